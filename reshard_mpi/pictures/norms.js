"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function choose(number) {
  for (const circle of document.querySelectorAll("circle.chosen")) circle.classList.remove("chosen");
  const circle = document.querySelector(`circle[data-point="${number}"]`);
  if (circle !== null) circle.classList.add("chosen");
  document.getElementById("chosen").textContent = data.names[number];
  document.getElementById("told").textContent = data.told[number];
  const lines = data.found[number].map((text) => {
    const line = document.createElement("li");
    line.textContent = text;
    return line;
  });
  document.getElementById("found").replaceChildren(...lines);
}

document.addEventListener("click", (event) => {
  const item = event.target.closest("[data-point]");
  if (item !== null) choose(Number(item.dataset.point));
});
