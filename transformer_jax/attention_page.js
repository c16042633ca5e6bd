"use strict";
// Draws the page that attention_page.py writes. All text of the user's goes in as text, never as markup.
(async () => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const { layers, heads, rows, columns, shortcuts } = data;
  const T = rows.length, S = columns.length, SVG = "http://www.w3.org/2000/svg";

  const packed = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(unpacked).arrayBuffer());
  const weight = (layer, head, row, column) => {
    const at = ((layer * heads + head) * T + row) * S + column;
    return (bytes[at] + 256 * bytes[at + bytes.length / 2]) / data.steps;
  };

  // White to dark blue: the lightness alone tells the weight, by its square root, which keeps small ones apart.
  const shades = Array.from({ length: 256 }, (_, i) => {
    const share = i / 255, mix = (from, to) => Math.round(from + (to - from) * share);
    return [mix(255, 8), mix(255, 38), mix(255, 92)];
  });

  const state = { layer: 0, head: 0, row: 0, column: S - 1, view: "map", ...(data.start || {}) };
  const whole = (value, count) => Math.min(Math.max(Number.parseInt(value, 10) || 0, 0), count - 1);

  function readFragment() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (asked.has("layer")) state.layer = whole(asked.get("layer") - 1, layers);
    if (asked.has("head")) state.head = whole(asked.get("head") - 1, heads);
    if (asked.has("from")) state.row = whole(asked.get("from"), T);
    if (asked.has("to")) state.column = whole(asked.get("to"), S);
    if (["map", "from", "to"].includes(asked.get("view"))) state.view = asked.get("view");
  }

  function make(tag, parent, properties = {}, text = "") {
    const made = document.createElement(tag);
    Object.assign(made, properties);
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const named = (piece, number) => `“${piece.text}” (${number})`;
  const groupClass = (piece) => (piece.group ? `group-${data.groups.indexOf(piece.group)}` : "");

  // --- every layer and head as small multiples

  const thumbs = [];
  {
    const table = byId("heads"), first = make("tr", make("thead", table));
    make("td", first);
    for (let n = 0; n < heads; n++) make("th", first, { scope: "col" }, String(n + 1));
    const body = make("tbody", table);
    for (let l = 0; l < layers; l++) {
      const line = make("tr", body);
      make("th", line, { scope: "row" }, `layer ${l + 1}`);
      for (let n = 0; n < heads; n++) {
        const button = make("button", make("td", line), { type: "button" });
        button.setAttribute("aria-label", `layer ${l + 1}, head ${n + 1}`);
        button.title = `layer ${l + 1}, head ${n + 1}`;
        button.addEventListener("click", () => choose({ layer: l, head: n }));
        button.addEventListener("keydown", (event) => {
          const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
          if (!move) return;
          event.preventDefault();
          const to = { layer: whole(l + move[0], layers), head: whole(n + move[1], heads) };
          choose(to);
          thumbs[to.layer * heads + to.head].button.focus();
        });
        thumbs.push({ layer: l, head: n, button, canvas: make("canvas", button) });
      }
    }
  }

  function drawMap(canvas, layer, head) {
    canvas.width = S;
    canvas.height = T;
    const context = canvas.getContext("2d"), image = context.createImageData(S, T);
    for (let t = 0, at = 0; t < T; t++) {
      for (let s = 0; s < S; s++, at += 4) {
        const [r, g, b] = shades[Math.round(255 * Math.sqrt(weight(layer, head, t, s)))];
        image.data[at] = r;
        image.data[at + 1] = g;
        image.data[at + 2] = b;
        image.data[at + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
  }

  function drawBars(canvas, values) {
    const wide = values.length > 24 ? 1 : 4, high = 64, gap = wide > 1 ? 1 : 0;
    canvas.width = values.length * wide;
    canvas.height = high;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, high);
    context.fillStyle = "rgb(8, 38, 92)";
    values.forEach((w, i) => context.fillRect(i * wide, high - w * high, wide - gap, w * high));
  }

  const fromRow = (layer, head, row) => columns.map((_, s) => weight(layer, head, row, s));
  const toColumn = (layer, head, column) => rows.map((_, t) => weight(layer, head, t, column));

  function drawThumbs() {
    for (const { layer, head, canvas } of thumbs) {
      if (state.view === "from") drawBars(canvas, fromRow(layer, head, state.row));
      else if (state.view === "to") drawBars(canvas, toColumn(layer, head, state.column));
      else drawMap(canvas, layer, head);
    }
    const what = {
      map: `rows are ${data.row_name}, columns ${data.column_name}`,
      from: `a bar for each of ${data.column_name}: its weight from ${named(rows[state.row], state.row)}`,
      to: `a bar for each of ${data.row_name}: its weight to ${named(columns[state.column], state.column)}`,
    }[state.view];
    byId("heads-caption").textContent = `All ${layers} × ${heads} heads; ${what}. Choose one to see it large.`;
  }

  // --- one head, large

  const cell = Math.max(10, Math.min(28, Math.floor(560 / Math.max(T, S))));
  const font = Math.min(13, cell + 1);
  const longest = (pieces) => Math.max(...pieces.map((p) => [...p.text].length), 3);
  const left = Math.min(longest(rows), 16) * font * 0.62 + 14, head_room = Math.min(longest(columns), 16) * font * 0.55 + 14;
  const map = byId("map"), large = byId("large"), marks = {};
  {
    const width = left + S * cell + head_room, height = head_room + T * cell + 2;
    map.style.width = `${width}px`;
    map.style.height = `${height}px`;
    Object.assign(large.style, {
      left: `${left}px`, top: `${head_room}px`, width: `${S * cell}px`, height: `${T * cell}px`,
    });
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("font-size", font);
    const label = (piece, transform, anchor) => {
      const text = document.createElementNS(SVG, "text");
      const characters = [...piece.text];
      text.textContent = characters.length > 16 ? `${characters.slice(0, 15).join("")}…` : piece.text;
      text.setAttribute("transform", transform);
      text.setAttribute("text-anchor", anchor);
      text.setAttribute("class", groupClass(piece));
      svg.append(text);
    };
    rows.forEach((p, t) => label(p, `translate(${left - 5},${head_room + (t + 0.5) * cell + font * 0.35})`, "end"));
    columns.forEach((p, s) => label(p, `translate(${left + (s + 0.65) * cell},${head_room - 5}) rotate(-60)`, "start"));
    for (const name of ["row", "column"]) {
      const mark = document.createElementNS(SVG, "rect");
      mark.setAttribute("class", "mark");
      svg.append(mark);
      marks[name] = mark;
    }
    map.append(svg);
  }

  function place(mark, x, y, width, height) {
    Object.entries({ x, y, width, height }).forEach(([name, value]) => mark.setAttribute(name, value));
  }

  function cellAt(event) {
    const box = large.getBoundingClientRect();
    return [
      whole(Math.floor(((event.clientY - box.top) / box.height) * T), T),
      whole(Math.floor(((event.clientX - box.left) / box.width) * S), S),
    ];
  }

  large.addEventListener("mousemove", (event) => show(...cellAt(event)));
  large.addEventListener("mouseleave", () => show(state.row, state.column));
  large.addEventListener("click", (event) => {
    const [row, column] = cellAt(event);
    choose({ row, column });
  });
  map.addEventListener("keydown", (event) => {
    const { row, column } = state;
    const to = {
      ArrowLeft: { column: whole(column - 1, S) }, ArrowRight: { column: whole(column + 1, S) },
      ArrowUp: { row: whole(row - 1, T) }, ArrowDown: { row: whole(row + 1, T) },
      Home: { column: 0 }, End: { column: S - 1 }, PageUp: { row: 0 }, PageDown: { row: T - 1 },
    }[event.key];
    if (!to) return;
    event.preventDefault();
    choose(to);
  });

  // --- the pieces of one row and of one column

  function fill(id, caption, pieces, values) {
    const table = byId(id);
    table.replaceChildren();
    const sums = data.groups.map((g) => {
      const share = pieces.reduce((sum, p, i) => sum + (p.group === g ? values[i] : 0), 0);
      return `${g} ${share.toFixed(3)}`;
    });
    make("caption", table, {}, caption + (sums.length ? ` In all: ${sums.join(", ")}.` : ""));
    const body = make("tbody", table);
    pieces.forEach((piece, i) => {
      const line = make("tr", body);
      make("td", line, { className: "n" }, String(i));
      make("th", line, { scope: "row", className: groupClass(piece) }, piece.text);
      const bar = make("div", make("td", line, { className: "bar" }));
      bar.style.width = `${(100 * values[i]).toFixed(1)}%`;
      make("td", line, { className: "n" }, values[i].toFixed(3));
    });
  }

  function show(row, column) {
    const { layer, head } = state, w = weight(layer, head, row, column);
    const from = named(rows[row], row), to = named(columns[column], column);
    byId("readout").textContent = `Layer ${layer + 1}, head ${head + 1}: ${from} looks at ${to} with ${w.toFixed(3)}.`;
    place(marks.row, left - 1, head_room + row * cell - 1, S * cell + 2, cell + 2);
    place(marks.column, left + column * cell - 1, head_room - 1, cell + 2, T * cell + 2);
    fill("from", `What ${from} looks at.`, columns, fromRow(layer, head, row));
    fill("to", `What looks at ${to}.`, rows, toColumn(layer, head, column));
  }

  // --- what is chosen

  const views = [];
  {
    const offered = [
      { label: "whole maps", view: "map" }, ...shortcuts,
      { label: "from the chosen row", view: "from" }, { label: "to the chosen column", view: "to" },
    ];
    for (const { label, ...change } of offered) {
      const button = make("button", byId("views"), { type: "button" }, label);
      button.addEventListener("click", () => choose(change));
      views.push([button, change]);
    }
  }

  function update() {
    drawThumbs();
    drawMap(large, state.layer, state.head);
    for (const { layer, head, button } of thumbs) {
      const chosen = layer === state.layer && head === state.head;
      button.setAttribute("aria-pressed", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
    for (const [button, change] of views) {
      button.setAttribute("aria-pressed", String(Object.entries(change).every(([name, value]) => state[name] === value)));
    }
    byId("large-caption").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
    show(state.row, state.column);
  }

  function choose(change) {
    Object.assign(state, change);
    const { layer, head, row, column, view } = state;
    const fragment = `#layer=${layer + 1}&head=${head + 1}&from=${row}&to=${column}&view=${view}`;
    try {
      history.replaceState(null, "", fragment);
    } catch {
      // A page without an address of its own keeps its state to itself.
    }
    update();
  }

  addEventListener("hashchange", () => {
    readFragment();
    update();
  });
  readFragment();
  update();
  document.body.classList.add("drawn");
  // A map that fills the window goes below the tables, which then stand beside the small ones.
  document.body.classList.toggle("long", S * cell > 700);
})().catch((error) => {
  document.getElementById("readout").textContent = `The page could not be drawn: ${error}`;
});
