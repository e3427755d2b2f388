// Every choice is a step in the browser's history: Back gives the view before.
//
// Streamlit replaces the address when a widget changes and pushes the one that its server sends. Here a changed one is
// pushed where the visitor did something since the page was opened, by a link or by Back. Else it is no choice but an
// address that is completed or a wrong value that gives way: that takes the place of what was opened, or Back would
// lead to it again. What a clicked link's page changes before its name stands in the address is no step of the page
// that is left.
export default function () {
  if (window.smeltHistory) return;
  window.smeltHistory = true;
  const push = history.pushState.bind(history);
  const replace = history.replaceState.bind(history);
  let chose = false, leaving = false;
  for (const did of ["pointerdown", "keydown", "click", "input"])
    window.addEventListener(did, () => { chose = true; }, true);
  window.addEventListener("click", (event) => {
    const link = event.ctrlKey || event.metaKey || event.shiftKey ? null : event.target.closest?.("a[href]");
    leaving = Boolean(link) && !link.target && link.origin === location.origin && link.pathname !== location.pathname;
  }, true);
  // What the server completed or corrected before this script was here, Streamlit has pushed: Back leaves that too.
  const here = location.href, opened = performance.getEntriesByType("navigation")[0]?.name ?? here;
  const gaveWay = opened !== here && new URL(opened).pathname === location.pathname ? opened : null;
  window.addEventListener("popstate", (event) => {
    chose = leaving = false;
    if (location.href !== gaveWay) return;
    event.stopImmediatePropagation();
    history.back();
    setTimeout(() => location.href === gaveWay && replace(history.state, "", here), 500); // nothing lies before it
  }, true);
  const step = (state, title, url) => {
    const to = new URL(url ?? location.href, location.href);
    // A link says what stays chosen, for another tab; in this one Streamlit adds it once more.
    to.search = [...new Set(to.search.slice(1).split("&"))].join("&");
    const opened = to.pathname !== location.pathname;
    if (leaving && !opened) return;
    const pushed = chose && (opened || to.search !== location.search);
    if (opened) chose = leaving = false;
    (pushed ? push : replace)(state, title, to);
  };
  history.pushState = step;
  history.replaceState = step;
}
