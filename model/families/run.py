"""The pass that is running now, and which step of its plan.

transformers calls our attention function and torch our module hooks from inside the authors' forward pass; here they
find the hook points of the step that they belong to. A step begins when a layer's module is called: it is told by the
module, and its visit by how often the layer was called before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from model.families.family import Family
from model.hooks.hook_point import SitePoint
from model.hooks.names import Request
from model.inputs import Inputs
from smelt_interp.errors import UserError
from smelt_interp.plan import label


class Stopped(Exception):
    """The pass has come to the step before which it ends."""

    def __init__(self, stream_BTD: Tensor) -> None:
        super().__init__()
        self.stream_BTD = stream_BTD


class FamilyRun:
    """One forward pass of a family's network."""

    def __init__(self, request: Request, family: Family, blocks: nn.ModuleList, read: Inputs) -> None:
        self.request, self._family, self._blocks = request, family, blocks
        self._start_BTD = None if request.from_tokens else read.values
        self.kv_cache = read.kv_cache
        self.batch = len(read.values)
        """Rows B, which routers see joined to one list of tokens."""
        self.within_BTS: Tensor | None = None
        """True where a key is of the query's own document, and no padding that the network's own mask does not know;
        None is everywhere."""
        self.padded = False
        """Whether the rows hold padding, whose queries see themselves alone."""
        self.middle: Tensor | None = None
        """What a hook added to the stream between attention and MLP of the running step."""
        self._step = -1
        self._running: nn.Module | None = None

    @contextmanager
    def now(self) -> Iterator[None]:
        """The block in which this is the running pass. Raises `UserError` at its end when steps are missing."""
        before = RUNNING.set(self)
        try:
            yield
        finally:
            RUNNING.reset(before)
        plan = self.request.architecture.steps
        if self._step + 1 != len(plan):
            due = label(plan[self._step + 1])
            raise UserError(f"{self._named()} must run the {len(plan)} steps of its plan; got {self._step + 1}: "
                            f"{due} did not run")  # fmt: skip

    def enter(self, layer: int, module: nn.Module, stream_BTD: Tensor) -> Tensor:
        """A layer begins: what it reads. Raises `UserError` for one that is not the next of the plan, and `Stopped`
        where the pass ends."""
        plan = self.request.architecture.steps
        self._step += 1
        if self._step >= len(plan) or plan[self._step].layer != layer:
            due = label(plan[self._step]) if self._step < len(plan) else "its end"
            raise UserError(f"{self._named()} must run its layers in the order of its plan; got layer {layer + 1} "
                            f"as step {self._step + 1}, where {due} is due")  # fmt: skip
        if self._step == self.request.first_step and self._start_BTD is not None:
            stream_BTD = self._start_BTD
        if self._step == self.request.stop_step:
            raise Stopped(stream_BTD)
        if self.skips:
            return stream_BTD
        self._running, self.middle = module, None
        return self.through("hook_resid_pre", stream_BTD)

    def leave(self) -> None:
        """The layer ends."""
        self._running = None

    @property
    def skips(self) -> bool:
        """Whether the running step lies before the one at which the pass starts."""
        return self._step < self.request.first_step

    def remembered(self, key_BGTC: Tensor, value_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the running step with those of the tokens before them, (B, G, S, C)."""
        if self.kv_cache is None:
            return key_BGTC, value_BGTC
        k_BSGC, v_BSGC = self.kv_cache.append(self._step, key_BGTC.transpose(1, 2), value_BGTC.transpose(1, 2))
        return k_BSGC.transpose(1, 2), v_BSGC.transpose(1, 2)

    def attends(self, module: nn.Module) -> bool:
        """Whether a module is the attention of the running step: families call the interface for other things too."""
        return self._running is not None and module is self._running.get_submodule(self._family.attention)

    @property
    def factor(self) -> float:
        """The loop factor of the running step."""
        return self.request.architecture.loop_factors[self._step]

    def point(self, suffix: str) -> SitePoint:
        """A hook point of the running step."""
        point = self.points(suffix)
        assert isinstance(point, SitePoint)
        return point

    def points(self, folder: str) -> nn.Module:
        """What holds hook points of the running step, e.g. those of `ln1`."""
        return self._blocks[self._step].get_submodule(folder)

    @property
    def is_over(self) -> bool:
        """Whether the last step has ended."""
        return self._running is None and self._step + 1 == len(self.request.architecture.steps)

    def through(self, suffix: str, x: Tensor) -> Tensor:
        """A value behind its hook point; itself at a site that the family has not."""
        if suffix not in self.request.architecture.sites:
            return x
        out: Tensor = self.point(suffix)(x)
        return out

    def heads_through(self, suffix: str, x_BHTC: Tensor) -> Tensor:
        """The same for a value with its heads before its positions."""
        return self.through(suffix, x_BHTC.transpose(1, 2)).transpose(1, 2)

    def _named(self) -> str:
        return f"a network of family {self.request.architecture.family}"


RUNNING: ContextVar[FamilyRun | None] = ContextVar("RUNNING", default=None)
"""The pass that this thread runs now; None when a network's own `forward` is called by someone else."""
