"use strict";
(() => {
  const root = document.documentElement;
  const floats = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
  };
  const colours = () => {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
    const zero = read("--zero");
    return { cold: [zero, read("--cold-mid"), read("--cold-end")], warm: [zero, read("--warm-mid"), read("--warm-end")] };
  };
  const shade = (level, ramps) => {
    const ramp = level < 0 ? ramps.cold : ramps.warm;
    const t = 2 * Math.min(1, Math.abs(level));
    const [a, b] = t <= 1 ? [ramp[0], ramp[1]] : [ramp[1], ramp[2]];
    const s = t <= 1 ? t : t - 1;
    return a.map((x, i) => Math.round(x + (b[i] - x) * s));
  };
  const number = (x) => (x === 0 ? "0" : Number(x.toPrecision(6)).toString().replace("-", "−"));
  const span = (cell, size, last) => {
    const first = cell * size;
    const end = Math.min(last, first + size) - 1;
    return end > first ? `${first}–${end}` : `${first}`;
  };

  class Field {
    constructor(element) {
      this.element = element;
      const data = JSON.parse(document.getElementById(element.dataset.map).textContent);
      Object.assign(this, data);
      this.values = floats(data.values);
      this.errors = data.errors === null ? null : floats(data.errors);
      this.canvas = element.querySelector("canvas");
      this.cursor = element.querySelector(".cursor");
      this.output = document.getElementById(`${element.dataset.map}-value`);
      this.spot = null;
      if (this.vector) { element.style.height = "120px"; this.canvas.style.height = "120px"; }
      else {  // a long narrow matrix is stretched so that its cells can be met
        const ratio = Math.min(1.3, Math.max(0.22, this.rows / this.columns));
        element.style.aspectRatio = `${1 / ratio}`;
        this.canvas.style.height = "100%";
      }
      element.addEventListener("pointermove", (event) => this.meet(event));
      element.addEventListener("pointerdown", (event) => this.meet(event));
      element.addEventListener("pointerleave", () => { if (document.activeElement !== element) this.cursor.hidden = true; });
      element.addEventListener("focus", () => { if (element.matches(":focus-visible")) this.show(...(this.spot ?? [0, 0])); });
      element.addEventListener("blur", () => { this.cursor.hidden = true; });
      element.addEventListener("keydown", (event) => this.key(event));
    }
    draw(ramps) {
      if (this.vector) { this.bars(ramps); return; }
      this.canvas.width = this.columns; this.canvas.height = this.rows;
      const context = this.canvas.getContext("2d");
      const image = context.createImageData(this.columns, this.rows);
      for (let i = 0; i < this.values.length; i++) {
        const [r, g, b] = shade(this.scale > 0 ? this.values[i] / this.scale : 0, ramps);
        image.data.set([r, g, b, 255], 4 * i);
      }
      context.putImageData(image, 0, 0);
    }
    bars(ramps) {
      const step = Math.max(3, Math.ceil(1200 / this.columns)), height = 240;
      this.canvas.width = step * this.columns; this.canvas.height = height;
      this.canvas.style.imageRendering = "auto";
      const context = this.canvas.getContext("2d"), style = getComputedStyle(root);
      const scale = this.scale > 0 ? (height / 2 - 6) / this.scale : 0;
      context.clearRect(0, 0, this.canvas.width, height);
      for (let i = 0; i < this.columns; i++) {
        const size = this.values[i] * scale, x = i * step, gap = step > 5 ? Math.ceil(step / 6) : 1;
        const level = this.scale > 0 ? this.values[i] / this.scale : 0;
        const [r, g, b] = shade(Math.sign(level) * (0.35 + 0.45 * Math.abs(level)), ramps);
        context.fillStyle = `rgb(${r} ${g} ${b})`;
        context.fillRect(x, Math.min(height / 2, height / 2 - size), step - gap, Math.max(1, Math.abs(size)));
        const error = this.errors === null ? 0 : this.errors[i] * scale;
        if (error >= 1) {
          context.fillStyle = style.getPropertyValue("--ink");
          context.fillRect(x + (step - gap) / 2 - 1, height / 2 - size - error, 2, 2 * error);
        }
      }
      context.fillStyle = style.getPropertyValue("--muted");
      context.fillRect(0, height / 2, this.canvas.width, 1);
    }
    meet(event) {
      const area = this.element.getBoundingClientRect();
      const column = Math.floor(((event.clientX - area.left) / area.width) * this.columns);
      const row = Math.floor(((event.clientY - area.top) / area.height) * this.rows);
      if (column >= 0 && row >= 0 && column < this.columns && row < this.rows) this.show(row, column);
    }
    key(event) {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0] };
      let [row, column] = this.spot ?? [0, 0];
      if (event.key in moves) { row += moves[event.key][0]; column += moves[event.key][1]; }
      else if (event.key === "Home") column = 0;
      else if (event.key === "End") column = this.columns - 1;
      else return;
      event.preventDefault();
      const inside = (x, count) => Math.min(count - 1, Math.max(0, x));
      this.show(inside(row, this.rows), inside(column, this.columns));
    }
    show(row, column) {
      this.spot = [row, column];
      const place = row * this.columns + column;
      const across = span(column, this.width, this.shape[1]);
      const where = this.vector ? `entry ${across}` : `row ${span(row, this.height, this.shape[0])}, column ${across}`;
      const error = this.errors === null ? "" : ` ± ${this.errors[place].toExponential(1).replace("-", "−")}`;
      this.output.textContent = `${where}: ${number(this.values[place])}${error}`;
      const { style } = this.cursor;
      style.left = `${(100 * column) / this.columns}%`; style.width = `${100 / this.columns}%`;
      style.top = `${(100 * row) / this.rows}%`; style.height = `${100 / this.rows}%`;
      this.cursor.hidden = false;
    }
  }

  const fields = [...document.querySelectorAll("[data-map]")].map((element) => new Field(element));
  const paint = () => { const ramps = colours(); fields.forEach((field) => field.draw(ramps)); };
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const refresh = () => { button.setAttribute("aria-pressed", String(dark())); paint(); };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; refresh(); });
  system.addEventListener("change", refresh);
  let chosen, folded = [];
  addEventListener("beforeprint", () => {  // paper is white, and nothing on it can be unfolded
    chosen = root.dataset.theme; root.dataset.theme = "light";
    folded = [...document.querySelectorAll("details.part:not([open])")];
    folded.forEach((part) => { part.open = true; });
    paint();
  });
  addEventListener("afterprint", () => {
    if (chosen === undefined) delete root.dataset.theme; else root.dataset.theme = chosen;
    folded.forEach((part) => { part.open = false; });
    paint();
  });
  refresh();
})();
