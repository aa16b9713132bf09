
"use strict";
(function () {
  const MOST_ROWS = 300, MOST_NAMES = 400;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  function bytes(size) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let step = 0;
    while (size >= 1024 && step < units.length - 1) { size /= 1024; step += 1; }
    return (step ? size.toFixed(2) : String(size)) + " " + units[step];
  }

  function source(number) { return data.sourceNames[number] ?? number; }
  function target(number) { return data.targetNames[number] ?? number; }
  function within(number, pair) { return pair[0] <= number && number <= pair[1]; }
  function counted(count, word) { return count + " " + word + (count === 1 ? "" : "s"); }

  function fill(table, rows) {
    const body = table.tBodies[0];
    body.replaceChildren();
    for (const row of rows) {
      const line = body.insertRow();
      for (const value of row) {
        const cell = line.insertCell();
        cell.textContent = String(value.text ?? value);
        if (value.text !== undefined || typeof value === "number") cell.className = "number";
      }
    }
    table.hidden = rows.length === 0;
  }

  function marked(keys) {
    for (const old of document.querySelectorAll("#matrix .chosen")) old.classList.remove("chosen");
    for (const item of document.querySelectorAll("#matrix [data-key]")) {
      if (keys(item.dataset.key.split(" "))) item.classList.add("chosen");
    }
  }

  function choose(key) {
    const [kind, first, second] = key.split(" ");
    const row = kind === "column" ? null : data.rows[Number(first)];
    const column = kind === "row" ? null : data.columns[Number(kind === "column" ? first : second)];
    const feeds = data.feeds.filter((feed) => (!row || within(feed[0], row)) && (!column || within(feed[1], column)));
    const total = feeds.reduce((sum, feed) => sum + feed[3], 0);
    const from = row ? "source " + data.rowNames[Number(first)] : "";
    const to = column ? "target " + data.columnNames[Number(kind === "column" ? first : second)] : "";
    byId("chosen").textContent = row && column ? from + " to " + to : from || to;
    byId("told").textContent = !feeds.length ? "Nothing is read." :
      (row ? (column ? "" : "feeds " + counted(new Set(feeds.map((feed) => feed[1])).size, "target") + ": ")
        : "reads " + counted(new Set(feeds.map((feed) => feed[0])).size, "source") + ": ") + bytes(total);
    fill(byId("feeds"), feeds.slice(0, MOST_ROWS).map((feed) => [
      source(feed[0]), target(feed[1]), feed[2], { text: bytes(feed[3]) },
      data.sourceFiles[feed[0]] ?? "", data.targetFiles[feed[1]] ?? "",
    ]));
    byId("more").textContent = feeds.length > MOST_ROWS ? "and " + (feeds.length - MOST_ROWS) + " smaller ones" : "";
    marked((parts) => kind === "cell" ? parts.join(" ") === key :
      parts.join(" ") === key || (parts[0] === "cell" && parts[kind === "row" ? 1 : 2] === first));
  }

  byId("matrix").addEventListener("click", (event) => {
    const item = event.target.closest("[data-key]");
    if (item) choose(item.dataset.key);
  });
  byId("matrix").addEventListener("keydown", (event) => {
    const item = event.target.closest("[data-key]");
    if (item && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); choose(item.dataset.key); }
  });
  for (const label of document.querySelectorAll("#matrix text[data-key^=row], #matrix text[data-key^=column]")) {
    label.setAttribute("tabindex", "0");
    label.setAttribute("role", "button");
  }

  function show(number, name) {
    const cut = data.cuts[number];
    byId("cut").replaceChildren(byId("cut-" + number).content.cloneNode(true));
    const drawn = name === cut.names[0] ? "" : " (drawn: " + cut.names[0] + ", which is cut in the same way)";
    byId("tensor").textContent = "What " + name + " is made of" + drawn;
    fill(byId("moves"), cut.moves.map((move) => [
      target(move[0]), move[1], move[2] === null ? "made up" : source(move[2]), move[3], move[4], { text: bytes(move[6]) }, move[5],
    ]));
    byId("more-moves").textContent = cut.moreMoves ? "and " + cut.moreMoves + " more" : "";
    for (const button of document.querySelectorAll("#names button")) {
      button.setAttribute("aria-pressed", String(button.dataset.cut === String(number) && button.textContent === name));
    }
  }

  function list() {
    const wanted = byId("search").value.toLowerCase();
    const items = [];
    let matching = 0;
    data.cuts.forEach((cut, number) => {
      for (const name of cut.names) {
        if (!name.toLowerCase().includes(wanted)) continue;
        matching += 1;
        if (items.length >= MOST_NAMES) continue;
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        button.dataset.cut = String(number);
        button.title = cut.shape;
        button.addEventListener("click", () => show(number, name));
        const item = document.createElement("li");
        item.append(button);
        items.push(item);
      }
    });
    byId("names").replaceChildren(...items);
    const all = data.cuts.reduce((sum, cut) => sum + cut.count, 0);
    const named = data.cuts.reduce((sum, cut) => sum + cut.names.length, 0);
    byId("count").textContent = matching + " of " + counted(all, "tensor") + " in " + counted(data.cuts.length, "kind") +
      (named < all ? "; " + (all - named) + " more, like these, are not named here" : "") +
      (matching > items.length ? "; the first " + items.length + " are listed" : "");
  }

  byId("search").addEventListener("input", list);
  list();
  if (data.cuts.length) show(0, data.cuts[0].names[0]);
})();
