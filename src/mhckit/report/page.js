"use strict";
// The page works on what it carries: choices show one of several parts, matrices are drawn from their numbers, and what
// has a data-tip says it. Text only ever becomes text: textContent and setAttribute, never HTML.
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function element(name, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  function shape(name, attributes, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  // Choices.
  for (const choice of document.querySelectorAll(".choice")) {
    const select = choice.querySelector("select");
    const parts = choice.querySelectorAll(":scope > .option");
    const show = () => parts.forEach((part, index) => { part.hidden = index !== select.selectedIndex; });
    select.addEventListener("change", show);
    show();
  }

  // Matrices. A number that is none comes as a string.
  const isNumber = (value) => typeof value === "number";

  function digits(value) {
    if (!isNumber(value)) return value;
    const size = Math.abs(value);
    if (size >= 10) return size < 1000 ? value.toFixed(1) : value.toExponential(0);
    if (size < 0.0005) return "0";
    return size >= 0.095 ? value.toFixed(2) : value.toFixed(3);
  }

  function cell(value, limit, attributes) {
    if (!isNumber(value)) return shape("rect", { class: "cell none", ...attributes });
    const strength = Math.min(Math.abs(value) / limit, 1);
    return shape("rect", { class: value < 0 ? "cell minus" : "cell", "fill-opacity": strength.toFixed(3), ...attributes });
  }

  function heatMap(data, stack, index) {
    const matrix = stack.matrices[index];
    const figure = element("figure");
    figure.append(element("h3", {}, stack.title));
    figure.append(large(data, stack, matrix));
    figure.append(element("figcaption", {}, stack.caption));
    return figure;
  }

  function large(data, stack, matrix) {
    const size = 60, edge = 26, n = matrix.length, all = n * size;
    const words = matrix.map((row) => row.map(digits).join(" ")).join("; ");
    const svg = shape("svg", { viewBox: `0 0 ${all + edge} ${all + edge}`, role: "img", "aria-label": `${stack.title}, rows: ${words}` });
    const fontSize = n > 6 ? 13 : 16;
    matrix.forEach((row, to) => row.forEach((value, from) => {
      const x = edge + from * size, y = edge + to * size;
      const tip = `${data.column} ${from}, ${data.row} ${to}: ${value}`;
      svg.append(cell(value, stack.limit, { x, y, width: size, height: size, rx: 6, "data-tip": tip }));
      const strong = isNumber(value) && Math.abs(value) > 0.6 * stack.limit;
      const place = { x: x + size / 2, y: y + size / 2 + 5, class: strong ? "middle on-heat" : "middle", "pointer-events": "none" };
      const text = shape("text", place, isNumber(value) ? digits(value) : "×");
      text.style.fontSize = `${fontSize}px`;
      svg.append(text);
    }));
    for (let k = 0; k < n; k++) {
      svg.append(shape("text", { x: edge + (k + 0.5) * size, y: edge - 8, class: "label middle" }, String(k)));
      svg.append(shape("text", { x: edge - 8, y: edge + (k + 0.5) * size + 4, class: "label end" }, String(k)));
    }
    svg.append(shape("rect", { x: edge, y: edge, width: all, height: all, rx: 6, class: "frame" }));
    return svg;
  }

  function small(stack, matrix) {
    const n = matrix.length;
    const svg = shape("svg", { viewBox: `0 0 ${n} ${n}`, "aria-hidden": "true" });
    matrix.forEach((row, y) => row.forEach((value, x) => svg.append(cell(value, stack.limit, { x, y, width: 1, height: 1 }))));
    svg.append(shape("rect", { width: n, height: n, class: "frame", "stroke-width": n / 40 }));
    return svg;
  }

  function browse(box) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const which = box.querySelector(".which"), kind = box.querySelector(".kind");
    const panels = box.querySelector(".panels"), overview = box.querySelector(".overview");
    const [before, after] = [box.querySelector(".before"), box.querySelector(".after")];

    function show() {
      const index = which.selectedIndex;
      panels.replaceChildren(...data.stacks.map((stack) => heatMap(data, stack, index)));
      [...overview.children].forEach((button, place) => button.setAttribute("aria-pressed", place === index));
      before.disabled = index <= 0;
      after.disabled = index >= data.names.length - 1;
    }

    function select(index) {
      which.selectedIndex = index;
      show();
    }

    function drawOverview() {
      const stack = data.stacks[kind.selectedIndex];
      overview.replaceChildren(...data.names.map((name, index) => {
        const said = `${data.label} ${index + 1}: ${name}`;
        const button = element("button", { type: "button", "aria-label": said, "data-tip": said });
        button.append(small(stack, stack.matrices[index]), element("span", {}, String(index + 1)));
        button.addEventListener("click", () => select(index));
        return button;
      }));
      show();
    }

    which.addEventListener("change", show);
    kind.addEventListener("change", drawOverview);
    before.addEventListener("click", () => select(which.selectedIndex - 1));
    after.addEventListener("click", () => select(which.selectedIndex + 1));
    drawOverview();
    return select;
  }

  const browsers = [...document.querySelectorAll(".matrices")].map((box) => [box, browse(box)]);
  for (const link of document.querySelectorAll("a[data-select]")) {
    const found = browsers.find(([box]) => `#${box.id}` === link.getAttribute("href"));
    if (found) link.addEventListener("click", () => found[1](Number(link.dataset.select)));
  }

  // Tips, for the mouse, the finger and the keyboard.
  const tip = element("div", { class: "tip", role: "status" });
  let pointed = null;
  tip.hidden = true;
  document.body.append(tip);

  function hide() {
    if (pointed) pointed.classList.remove("on");
    pointed = null;
    tip.hidden = true;
  }

  function say(event) {
    const target = event.target.closest("[data-tip]");
    if (target === pointed) return;
    hide();
    if (!target) return;
    pointed = target;
    target.classList.add("on");
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const of = target.getBoundingClientRect(), own = tip.getBoundingClientRect(), room = 8;
    const left = Math.max(room, Math.min(of.left + of.width / 2 - own.width / 2, document.documentElement.clientWidth - own.width - room));
    tip.style.left = `${left}px`;
    tip.style.top = `${of.top - own.height - room > 0 ? of.top - own.height - room : of.bottom + room}px`;
  }

  document.addEventListener("pointerover", say);
  document.addEventListener("focusin", say);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
