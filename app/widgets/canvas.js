// Draws what the pages show cell by cell: a grid of heads, maps on one scale, a strip of tokens.
//
// The data are one line of JSON and then the arrays that it names, in order (canvas.py). What a click or a key chooses
// is drawn at once when its numbers are here, and told to the server, which answers with the whole picture again. A
// serial number keeps an answer that was overtaken by a later choice from being shown.

const MARGIN = { left: 50, top: 42, right: 8, bottom: 52 };
const SMALLEST_LABELLED = 11; // pixels of a cell from which every token is named
const BYTES = { float16: 2, float32: 4, uint8: 1, int32: 4 };
let halves = null; // every float16 as a number

export default function (component) {
  const view = (component.parentElement.view ??= newView(component.parentElement));
  view.tell = (chosen) => component.setTriggerValue("chosen", { ...chosen, serial: ++view.serial });
  const turn = (view.turn += 1);
  unpack(component.data).then((scene) => {
    if (turn === view.turn) show(view, scene);
  });
}

function newView(root) {
  const make = (tag, name, parent, attributes = {}) => {
    const element = document.createElement(tag);
    element.className = name;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };
  const outer = make("div", "canvas", root, { role: "group", tabindex: "0" });
  const view = { outer, make, serial: 0, turn: 0, zoom: null, hover: null };
  for (const part of ["grid", "maps", "read", "strip", "hint"]) view[part] = make("div", part, outer);
  view.read.setAttribute("aria-live", "polite");
  outer.addEventListener("keydown", (event) => onKey(view, event));
  new ResizeObserver(() => view.scene && view.width !== outer.clientWidth && draw(view)).observe(outer);
  return view;
}

// Data ---------------------------------------------------------------------------------------------------------------

async function unpack(bytes) {
  const end = bytes.indexOf(10);
  const scene = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  let body = bytes.slice(end + 1);
  if (scene.deflated) {
    const stream = new Blob([body]).stream().pipeThrough(new DecompressionStream("deflate"));
    body = new Uint8Array(await new Response(stream).arrayBuffer());
  }
  let at = 0;
  scene.of = {};
  for (const { name, type, shape } of scene.arrays) {
    const length = shape.reduce((product, size) => product * size, 1) * BYTES[type];
    const buffer = body.slice(at, at + length).buffer;
    at += length;
    const raw = type === "float16" ? new Uint16Array(buffer) : type === "int32" ? new Int32Array(buffer)
      : type === "uint8" ? new Uint8Array(buffer) : new Float32Array(buffer);
    scene.of[name] = { shape, values: type === "float16" ? fromHalves(raw) : raw };
  }
  return scene;
}

function fromHalves(raw) {
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
  const values = new Float32Array(raw.length);
  for (let i = 0; i < raw.length; i++) values[i] = halves[raw[i]];
  return values;
}

function show(view, scene) {
  if (scene.serial < view.serial) return; // overtaken: the answer to a later choice is on its way
  view.serial = scene.serial;
  view.scene = scene;
  view.size = scene.tokens.length;
  view.chosen = scene.chosen;
  view.zoom = windowAt(scene.chosen?.zoom);
  view.outer.classList.remove("waiting");
  view.outer.setAttribute("aria-label", scene.label);
  view.hint.textContent = scene.hint;
  draw(view);
}

function draw(view) {
  view.width = view.outer.clientWidth;
  if (view.scene.grid) drawGrid(view);
  if (view.scene.rows) drawMaps(view);
  drawStrip(view);
  read(view);
}

// Colours ------------------------------------------------------------------------------------------------------------

const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const mixed = (colour, depth) => parts(colour).map((part) => Math.round(255 + (part - 255) * depth));

function palette(negative, positive) { // white in the middle
  const table = new Uint32Array(513);
  for (let i = -256; i <= 256; i++) {
    const [r, g, b] = mixed(i < 0 ? negative : positive, Math.abs(i) / 256);
    table[i + 256] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return table;
}

// How deep the colour of a value is: 0 to 1.
const depthOf = (scale, most) => ({
  linear: (x) => x / most,
  "square root": (x) => Math.sqrt(x / most),
  clip: (x) => Math.min(x / most, 1),
})[scale];

function paint(values, rows, columns, depth, colours, grey) { // NaN is what cannot be seen
  const canvas = new OffscreenCanvas(columns, rows);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value !== value) pixels[i] = grey;
    else {
      const deep = Math.min(depth(Math.abs(value)), 1) * 256;
      pixels[i] = colours[Math.round(value < 0 ? 256 - deep : 256 + deep)];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function theme(view) {
  const style = getComputedStyle(view.outer);
  const dark = parts16(style.getPropertyValue("--st-background-color")) < 384;
  return { text: style.getPropertyValue("--st-text-color").trim() || "#222", grey: dark ? 0xff4a423b : 0xffdcd8d4 };
}
const parts16 = (colour) => (colour.trim().startsWith("#") ? parts(colour.trim()).reduce((a, b) => a + b) : 765);

// Grid of heads ------------------------------------------------------------------------------------------------------

function drawGrid(view) {
  const { scene, grid } = view;
  const { shape: [, rows, columns], values } = scene.of.thumbnails;
  const most = values.reduce((high, x) => (x === x ? Math.max(high, Math.abs(x)) : high), 1e-6);
  const colours = palette(scene.colours[0], scene.colours[1]);
  const depth = depthOf("square root", most), { grey } = theme(view);
  grid.replaceChildren();
  view.make("p", "caption", grid).textContent = scene.grid.caption.replace("{most}", most.toPrecision(2));
  const list = view.make("div", "thumbnails", grid);
  for (const at of scene.grid.order) {
    const head = scene.grid.heads[at], about = scene.grid.about[at];
    const button = view.make("button", head === view.chosen.head ? "chosen" : "", list, { type: "button" });
    button.setAttribute("aria-pressed", String(head === view.chosen.head));
    button.setAttribute("aria-label", `head ${head}, ${about}`);
    const canvas = view.make("canvas", "", button, { width: columns, height: rows, "aria-hidden": "true" });
    const cells = values.subarray(at * rows * columns, (at + 1) * rows * columns);
    canvas.getContext("2d").drawImage(paint(cells, rows, columns, depth, colours, grey), 0, 0);
    view.make("span", "", button).textContent = `${head}`;
    view.make("small", "", button).textContent = about;
    button.addEventListener("click", () => choose(view, { head }));
  }
}

// Maps ---------------------------------------------------------------------------------------------------------------

function drawMaps(view) {
  const { scene, maps } = view;
  view.cells = scene.rows.map((row, at) => cellsOf(scene, row, at, view.chosen.head)).filter((row) => row);
  if (!view.cells.length) return; // this head's numbers are on their way
  const most = scene.scale === "clip" ? clipAt(view.cells) : 1;
  const depth = depthOf(scene.scale, most), { grey, text } = theme(view);
  const across = Math.max(...view.cells.map((row) => row.maps.length));
  const side = Math.max(160, Math.min(Math.floor(view.width / across) - 12, 620));
  maps.replaceChildren();
  view.drawn = [];
  for (const row of view.cells) {
    view.make("p", "caption", maps).textContent = row.name;
    const line = view.make("div", "line", maps);
    for (const map of row.maps) {
      const [negative, positive] = map.signed ? scene.colours : [map.colour, map.colour];
      const picture = paint(map.values, view.size, view.size, depth, palette(negative, positive), grey);
      const label = `${row.name}, ${map.title}: ${scene.label}`;
      const canvas = view.make("canvas", "map", line, { role: "img", "aria-label": label });
      const ratio = window.devicePixelRatio || 1;
      const tall = side - MARGIN.left - MARGIN.right + MARGIN.top + MARGIN.bottom;
      Object.assign(canvas, { width: side * ratio, height: tall * ratio });
      Object.assign(canvas.style, { width: `${side}px`, height: `${tall}px` });
      const drawn = { canvas, picture, map, side, ratio, most, text, negative, positive };
      view.drawn.push(drawn);
      listen(view, drawn);
    }
  }
  redraw(view);
}

// One head's matrices of a row, unseen cells NaN, and the last visit minus the first.
function cellsOf(scene, row, at, head) {
  const sent = row.heads.indexOf(head);
  if (sent < 0) return null;
  const { shape: [, visits, count], values } = scene.of[`row ${at}`];
  const size = scene.tokens.length, uniform = new Float32Array(size);
  const each = Array.from({ length: visits }, () => new Float32Array(size * size).fill(NaN));
  for (let query = 0, from = 0; query < size; query++) {
    const seen = [];
    const last = scene.causal ? query : size - 1;
    for (let key = scene.causal ? scene.starts[query] : 0; key <= last; key++)
      if (scene.starts[key] === scene.starts[query]) seen.push(key);
    uniform[query] = 1 / seen.length;
    for (let visit = 0; visit < visits; visit++) {
      const start = (sent * visits + visit) * count + from;
      for (let i = 0; i < seen.length; i++) each[visit][query * size + seen[i]] = values[start + i];
    }
    from += seen.length;
  }
  const drawn = each.map((cells, i) => ({ values: cells, title: row.titles[i], colour: scene.colours[Math.min(i, 1)] }));
  if (visits > 1) {
    const difference = each[visits - 1].map((x, i) => x - each[0][i]);
    drawn.push({ values: difference, title: row.difference, signed: true });
  }
  return { name: row.name, maps: drawn, uniform };
}

function clipAt(rows) { // what 99 of 100 cells of the visits do not reach
  const some = rows.flatMap((row) => row.maps.filter((map) => !map.signed)).flatMap(({ values }) => {
    const step = Math.max(1, Math.floor(values.length / 20000));
    return Array.from({ length: Math.floor(values.length / step) }, (_, i) => values[i * step]).filter((x) => x === x);
  });
  some.sort((a, b) => a - b);
  return Math.max(some[Math.floor(some.length * 0.99)] ?? 1, 1e-4);
}

const windowOf = (view) => view.zoom ?? { x: 0, y: 0, n: view.size };

function redraw(view) {
  const { x, y, n } = windowOf(view);
  for (const drawn of view.drawn ?? []) {
    const context = drawn.canvas.getContext("2d"), inner = innerOf(drawn);
    context.setTransform(drawn.ratio, 0, 0, drawn.ratio, 0, 0);
    context.clearRect(0, 0, drawn.canvas.width, drawn.canvas.height);
    context.imageSmoothingEnabled = n > inner.size; // thin columns must not vanish between pixels
    context.drawImage(drawn.picture, x, y, n, n, inner.left, inner.top, inner.size, inner.size);
    drawAxes(view, context, drawn, inner);
    drawBar(context, drawn, inner, view.scene.scale);
    const pinned = view.chosen.query === null ? null : view.chosen.query - 1;
    mark(context, inner, view, pinned, null);
    if (view.hover) mark(context, inner, view, view.hover.query, view.hover.key);
  }
}

const innerOf = ({ side }) => ({ left: MARGIN.left, top: MARGIN.top, size: side - MARGIN.left - MARGIN.right });

function drawAxes(view, context, drawn, inner) {
  const { x, y, n } = windowOf(view), cell = inner.size / n;
  const every = cell >= SMALLEST_LABELLED ? 1 : [2, 5, 10, 20, 50, 100, 200, 500].find((step) => step * cell >= 26) ?? 1000;
  context.font = "10px sans-serif";
  context.textBaseline = "middle";
  const name = (at) => (every === 1 ? `${view.scene.tokens[at].slice(0, 6)} ${at + 1}` : `${at + 1}`);
  for (let at = 0; at < view.size; at++) {
    if (every > 1 && (at + 1) % every && at > 0) continue;
    context.fillStyle = view.scene.roleColours[view.scene.roles[at]];
    if (at >= y && at < y + n) {
      context.textAlign = "right";
      context.fillText(name(at), inner.left - 4, inner.top + (at - y + 0.5) * cell);
    }
    if (at >= x && at < x + n) {
      context.save();
      context.translate(inner.left + (at - x + 0.5) * cell, inner.top + inner.size + 5);
      context.rotate(-Math.PI / 2);
      context.textAlign = "right";
      context.fillText(name(at), 0, 0);
      context.restore();
    }
  }
  context.fillStyle = drawn.text;
  context.textAlign = "left";
  context.fillText("query ↓  key →", 2, inner.top + inner.size + 46);
}

function drawBar(context, { map, most, text, negative, positive }, inner, scale) {
  const width = Math.round(inner.size * 0.55), left = inner.left + inner.size - width, depth = depthOf(scale, most);
  context.fillStyle = text;
  context.font = "600 12px sans-serif";
  context.textAlign = "left";
  context.fillText(map.title, inner.left, 10);
  context.font = "10px sans-serif";
  context.textAlign = "center";
  const low = map.signed ? -most : 0;
  for (let i = 0; i < width; i++) {
    const value = low + ((most - low) * i) / width;
    context.fillStyle = `rgb(${mixed(value < 0 ? negative : positive, depth(Math.abs(value))).join()})`;
    context.fillRect(left + i, 18, 1, 8);
  }
  context.fillStyle = text;
  for (const value of map.signed ? [-most, 0, most] : width < 100 ? [0, most] : [0, most / 4, most]) {
    context.textAlign = value === low ? "left" : value === most ? "right" : "center";
    context.fillText(String(Number(value.toPrecision(2))), left + ((value - low) / (most - low)) * width, 33);
  }
}

function mark(context, inner, view, query, key) {
  const { x, y, n } = windowOf(view), cell = inner.size / n;
  context.strokeStyle = "#111a";
  context.lineWidth = 1;
  if (query !== null && query >= y && query < y + n)
    context.strokeRect(inner.left, inner.top + (query - y) * cell, inner.size, Math.max(cell, 1));
  if (key !== null && key >= x && key < x + n)
    context.strokeRect(inner.left + (key - x) * cell, inner.top, Math.max(cell, 1), inner.size);
}

// Strip of tokens ----------------------------------------------------------------------------------------------------

function drawStrip(view) {
  const { scene, strip } = view;
  if (!view.tokens || view.tokens.of !== scene.tokens.join("\u0000")) {
    strip.replaceChildren();
    view.tokens = scene.tokens.map((token, at) => {
      const span = view.make("span", "", strip);
      span.textContent = token;
      span.style.borderBottomColor = scene.roleColours[scene.roles[at]];
      if (scene.rows) span.addEventListener("click", () => choose(view, { query: at + 1 }));
      span.addEventListener("pointerenter", () => point(view, view.hover?.query ?? pinnedOf(view), at));
      if (scene.breaks && token.includes("\\n")) view.make("br", "", strip);
      return span;
    });
    view.tokens.of = scene.tokens.join("\u0000");
    const legend = view.make("div", "legend", strip);
    for (const role of new Set(scene.roles)) {
      const item = view.make("i", "", legend);
      item.textContent = scene.roleNames[role];
      item.style.borderBottomColor = scene.roleColours[role];
    }
  }
  colourStrip(view);
}

const pinnedOf = (view) => (view.chosen.query === null ? view.size - 1 : view.chosen.query - 1);

// By given values, or by what a query gives to each token on the last visit minus the first.
function colourStrip(view) {
  const { scene } = view, given = scene.of.values, row = view.cells?.[0];
  const query = view.hover?.query ?? pinnedOf(view), map = row?.maps[row.maps.length - 1];
  const value = (at) => (given ? given.values[at] : map ? map.values[query * view.size + at] : NaN);
  const most = given ? scene.most : 1, depth = depthOf(given ? "linear" : "square root", most);
  const names = scene.categories ?? [];
  view.tokens.forEach((span, at) => {
    const x = value(at), filled = x === x;
    const colour = names[x] ?? scene.colours[x < 0 || (!map?.signed && !given) ? 0 : 1];
    const deep = names.length ? 0.45 : Math.min(depth(Math.abs(x)), 1) * 0.85;
    span.style.backgroundColor = filled ? `rgb(${mixed(colour, deep).join()})` : "";
    span.classList.toggle("filled", filled);
    span.classList.toggle("query", at === query && !given);
  });
}

// Pointer, keys and what they read -----------------------------------------------------------------------------------

function listen(view, drawn) {
  const cellAt = (event) => {
    const box = drawn.canvas.getBoundingClientRect(), inner = innerOf(drawn), { x, y, n } = windowOf(view);
    const key = x + Math.floor(((event.clientX - box.left - inner.left) / inner.size) * n);
    const query = y + Math.floor(((event.clientY - box.top - inner.top) / inner.size) * n);
    const inside = key >= x && key < x + n && query >= y && query < y + n;
    return inside ? { query: Math.min(query, view.size - 1), key: Math.min(key, view.size - 1) } : null;
  };
  let from = null;
  drawn.canvas.addEventListener("pointerdown", (event) => { from = cellAt(event); });
  drawn.canvas.addEventListener("pointermove", (event) => {
    const at = cellAt(event);
    if (at) point(view, at.query, at.key);
  });
  drawn.canvas.addEventListener("pointerleave", () => point(view, null, null));
  drawn.canvas.addEventListener("pointerup", (event) => {
    const to = cellAt(event);
    if (!from || !to) return;
    const n = Math.max(Math.abs(to.key - from.key), Math.abs(to.query - from.query)) + 1;
    if (n < 3) choose(view, { query: from.query + 1 === view.chosen.query ? null : from.query + 1 });
    else zoomTo(view, Math.min(from.key, to.key), Math.min(from.query, to.query), n);
    from = null;
  });
  drawn.canvas.addEventListener("dblclick", () => zoomTo(view, 0, 0, view.size));
}

function zoomTo(view, x, y, n) {
  const size = Math.max(4, Math.min(n, view.size));
  const within = (at) => Math.max(0, Math.min(Math.round(at), view.size - size));
  const zoom = size >= view.size ? null : `${within(y) + 1} ${within(x) + 1} ${size}`;
  if (zoom === (view.chosen.zoom || null)) return redraw(view);
  view.chosen = { ...view.chosen, zoom };
  view.zoom = windowAt(zoom);
  redraw(view);
  view.tell(view.chosen);
}

function windowAt(zoom) { // "query key cells", the first two from 1, as the address has it
  if (!zoom) return null;
  const [query, key, n] = zoom.split(" ").map(Number);
  return { x: key - 1, y: query - 1, n };
}

function point(view, query, key) {
  view.hover = query === null ? null : { query, key };
  redraw(view);
  colourStrip(view);
  read(view);
}

function read(view) {
  const { scene } = view;
  const query = view.hover?.query ?? pinnedOf(view), key = view.hover?.key ?? null;
  const token = (at) => `${at + 1} ‘${scene.tokens[at]}’`;
  if (scene.of.values) {
    view.read.textContent = key === null ? scene.summary : `token ${token(key)}, ${scene.readings[key]}`;
    return;
  }
  if (key === null) {
    view.read.textContent = `query ${token(query)}${view.chosen.query === null ? "" : ", pinned"}: point at a key to read it`;
    return;
  }
  const number = (x) => (x === x ? x.toFixed(4) : "not seen");
  const lines = (view.cells ?? []).map((row) => {
    const values = row.maps.map((map) => `${map.title} ${number(map.values[query * view.size + key])}`);
    return `${row.name}: ${values.join(", ")}; uniform ${number(row.uniform[query])}`;
  });
  const { sample, layer, head } = view.chosen;
  const where = `sample ${sample}, layer ${layer}, head ${head}, query ${token(query)}, key ${token(key)}`;
  view.read.textContent = [where, ...lines].join("\n");
}

function choose(view, change) {
  view.chosen = { ...view.chosen, ...change };
  const here = !("layer" in change || "sample" in change) && (view.scene.rows ?? []).every((row) => row.heads.includes(view.chosen.head));
  view.outer.classList.toggle("waiting", !here);
  if (here) draw(view);
  view.tell(view.chosen);
}

function onKey(view, event) {
  const { scene, chosen } = view;
  const { x, y, n } = windowOf(view), next = (name, by) => {
    const known = scene.known?.[name];
    const to = known?.[known.indexOf(chosen[name]) + by];
    if (to !== undefined) choose(view, { [name]: to });
  };
  const zoomBy = (times) => zoomTo(view, x + (n - n * times) / 2, y + (n - n * times) / 2, Math.round(n * times));
  const action = {
    ArrowRight: () => next("head", 1), ArrowLeft: () => next("head", -1),
    ArrowDown: () => next("layer", 1), ArrowUp: () => next("layer", -1),
    PageDown: () => next("sample", 1), PageUp: () => next("sample", -1),
    Escape: () => choose(view, { query: null }),
    "+": () => zoomBy(0.5), "-": () => zoomBy(2), 0: () => zoomTo(view, 0, 0, view.size),
  }[event.key];
  if (!action || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  action();
}
