// Says that a text of the form on the page is not the one that was run: a form tells the server nothing until it is sent.
export default function ({ parentElement, data }) {
  let mark = parentElement.querySelector(".pending");
  if (!mark) {
    mark = document.createElement("div");
    mark.className = "pending";
    mark.setAttribute("role", "status");
    parentElement.append(mark);
    document.addEventListener("input", () => mark.check());
  }
  mark.check = () => {
    const shown = [...document.querySelectorAll("[data-testid=stForm] textarea")].map((area) => area.value);
    // An area that is not drawn yet holds nothing that was typed.
    const same = shown.length !== data.length || JSON.stringify(shown) === JSON.stringify(data);
    mark.textContent = same ? "" : "Changed since it was run: press Run.";
  };
  mark.check();
}
