// Every choice is a step in the browser's history: Back gives the view before.
// Streamlit replaces the address when a widget changes; here a changed query of the same page is pushed instead.
export default function () {
  if (window.smeltHistory) return;
  window.smeltHistory = true;
  const push = history.pushState.bind(history);
  const replace = history.replaceState.bind(history);
  let moving = 0; // until when a change of the address is the browser's own step
  window.addEventListener("popstate", () => { moving = Date.now() + 1500; }, true);
  const target = (url) => new URL(url ?? location.href, location.href);
  history.replaceState = (state, title, url) => {
    const to = target(url);
    const chosen = to.pathname === location.pathname && to.search !== location.search && Date.now() > moving;
    (chosen ? push : replace)(state, title, url);
  };
  history.pushState = (state, title, url) => {
    const to = target(url);
    // The address of a page that names no capture is completed, which is no step of its own.
    const completed = to.pathname === location.pathname && !new URLSearchParams(location.search).has("capture")
      && to.searchParams.has("capture");
    (completed ? replace : push)(state, title, url);
  };
}
