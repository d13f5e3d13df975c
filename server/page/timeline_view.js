// Draws a Timeline on a canvas. What is drawn moves left and only new columns are added; all of it
// is drawn anew when the size, the colours, the width of a column or the height of a row changes.

import { kColumns, kRows, Phase } from "./timeline.js";

const kGutter = 44;  // pixels of CSS, for the requests' numbers
const kStrip = 0.22;  // of the height: the bars of time
const kGap = 10;
const kHighest = 28, kLowest = 3;  // of a row
const kFewestRows = 8;
const kWidths = [1, 2, 3, 4, 6, 8, 12];

export class TimelineView {
  columnWidth = 4;
  paused = false;
  last = 0;  // columns up to here are shown

  #canvas;
  #context;
  #timeline;
  #scale = 1;  // device pixels of a CSS pixel
  #drawn = -1;  // as `last` was; negative: nothing can be kept
  #rowHeight = 0;  // device pixels, as all below
  #height = 0;  // of the rows together
  #strip = 0;
  #step = 0;
  #top = 50;  // milliseconds of the highest bar
  #colours = {};
  #labels = "";

  constructor(canvas, timeline) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
    this.#timeline = timeline;
  }

  /** To be called when the canvas' size or the page's colours may be others. */
  reset() {
    const style = getComputedStyle(this.#canvas);
    for (const name of ["back", "faint", "line", "waiting", "prompt", "decode", "held", "broken", "edge", "own"]) {
      this.#colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.#scale = devicePixelRatio;
    const { width, height } = this.#canvas.getBoundingClientRect();
    this.#canvas.width = Math.max(1, Math.round(width * this.#scale));
    this.#canvas.height = Math.max(1, Math.round(height * this.#scale));
    this.#drawn = -1;
  }

  widen(by) {
    const next = kWidths[kWidths.indexOf(this.columnWidth) + by];
    if (next === undefined) return;
    this.columnWidth = next;
    this.#drawn = -1;
  }

  get #left() { return Math.round(kGutter * this.#scale); }
  get columns() { return Math.floor((this.#canvas.width - this.#left) / Math.max(this.#step, 1)); }

  /** The cell at a point of the canvas in CSS pixels, within it or not: {column, row}. */
  cellAt(x, y) {
    const right = this.#canvas.width - x * this.#scale;
    const row = Math.floor((y * this.#scale) / this.#rowHeight);
    return { column: this.last - 1 - Math.floor(right / this.#step), row };
  }

  /** Where a cell is, in CSS pixels. */
  placeOf({ column, row }) {
    return {
      x: (this.#canvas.width - (this.last - column) * this.#step) / this.#scale,
      y: (row * this.#rowHeight) / this.#scale,
      width: this.#step / this.#scale,
      height: this.#rowHeight / this.#scale,
    };
  }

  draw() {
    if (!this.paused) this.last = this.#timeline.count;
    this.#step = Math.max(1, Math.round(this.columnWidth * this.#scale));
    const fresh = this.last - this.#drawn;
    const first = Math.max(0, this.last - this.columns - 1, this.#timeline.count - kColumns);
    this.#measure(first);
    if (this.#drawn < 0 || fresh < 0 || fresh >= this.columns) {
      this.#clear(0);
      this.#drawColumns(first);
    } else if (fresh > 0) {
      const shift = fresh * this.#step, { width, height } = this.#canvas, left = this.#left;
      this.#context.drawImage(this.#canvas, left + shift, 0, width - left - shift, height, left, 0,
        width - left - shift, height);
      this.#clear(width - shift);
      this.#drawColumns(Math.max(first, this.#drawn));
    }
    this.#drawLabels(first);
    this.#drawn = this.last;
  }

  // Heights for what is to be seen.
  #measure(first) {
    const gap = Math.round(kGap * this.#scale);
    const rows = Math.max(this.#timeline.rowsSince(first), kFewestRows);
    const room = Math.round(this.#canvas.height * (1 - kStrip)) - gap;
    const rowHeight = Math.min(Math.max(Math.floor(room / rows), kLowest), Math.round(kHighest * this.#scale));
    const height = Math.min(room, rows * rowHeight);  // the bars have what is left
    this.#strip = this.#canvas.height - height - gap;
    let most = 0;
    for (let column = first; column < this.last; ++column) {
      most = Math.max(most, this.#timeline.milliseconds[column % kColumns]);
    }
    // 1, 2 or 5 with zeros.
    const power = 10 ** Math.floor(Math.log10(Math.max(most, 1)));
    const top = power * ([1, 2, 5].find((digit) => digit * power >= most) ?? 10);
    if (rowHeight === this.#rowHeight && top === this.#top && height === this.#height) return;
    this.#rowHeight = rowHeight;
    this.#height = height;
    this.#top = top;
    this.#drawn = -1;
  }

  #clear(x) {
    const { width, height } = this.#canvas;
    if (x === 0) this.#labels = "";
    this.#context.fillStyle = this.#colours.back;
    this.#context.fillRect(x, 0, width - x, height);
    this.#context.fillStyle = this.#colours.line;
    this.#context.fillRect(Math.max(x, this.#left), height - 1, width - x, 1);
  }

  // One rectangle for a cell and those like it to its right.
  #drawColumns(first) {
    const { phase, request } = this.#timeline, context = this.#context;
    const height = Math.max(1, this.#rowHeight - (this.#rowHeight > 4 * this.#scale ? Math.round(this.#scale) : 1));
    const xOf = (column) => this.#canvas.width - (this.last - column) * this.#step;
    const names = ["", "waiting", "prompt", "decode", "held"];
    const edge = this.#step > 2 ? Math.max(1, Math.round(this.#scale)) : 1;
    for (let row = 0; row < kRows; ++row) {
      const y = row * this.#rowHeight;
      if (y + this.#rowHeight > this.#height) break;
      for (let column = first; column < this.last;) {
        const cell = (column % kColumns) * kRows + row, begin = column, kind = phase[cell] & Phase.mask;
        let flags = 0;
        do {
          flags = phase[(column % kColumns) * kRows + row];
          ++column;
        } while (column < this.last && !(flags & (Phase.ends | Phase.breaks)) &&
                 (phase[(column % kColumns) * kRows + row] & Phase.mask) === kind &&
                 request[(column % kColumns) * kRows + row] === request[cell]);
        if (kind === Phase.none) continue;
        context.fillStyle = this.#colours[names[kind]];
        context.fillRect(xOf(begin), y, (column - begin) * this.#step, height);
        if (this.#timeline.own.has(request[cell])) {
          const stripe = Math.max(1, Math.round(Math.min(height / 3, 4 * this.#scale)));
          context.fillStyle = this.#colours.own;
          context.fillRect(xOf(begin), y + height - stripe, (column - begin) * this.#step, stripe);
        }
        if (phase[cell] & Phase.begins) {
          context.fillStyle = this.#colours.edge;
          context.fillRect(xOf(begin), y, edge, height);
        }
        if (flags & (Phase.ends | Phase.breaks)) {
          context.fillStyle = this.#colours[flags & Phase.breaks ? "broken" : "edge"];
          const width = flags & Phase.breaks ? Math.max(2 * edge, this.#step) : edge;
          context.fillRect(xOf(column) - width, y, width, height);
        }
      }
    }
    this.#drawBars(first, xOf);
    if (this.#step < 4 * this.#scale) return;
    context.fillStyle = this.#colours.back;  // columns apart
    for (let column = first; column < this.last; ++column) context.fillRect(xOf(column), 0, 1, this.#height);
  }

  #drawBars(first, xOf) {
    const { time, milliseconds, promptTokens, lost } = this.#timeline, context = this.#context;
    const bottom = this.#canvas.height - 1, full = this.#strip - 2;
    const width = Math.max(1, this.#step - (this.#step > 3 ? 1 : 0));
    for (let column = first; column < this.last; ++column) {
      const at = column % kColumns, x = xOf(column);
      if (column > 0 && Math.floor(time[at]) !== Math.floor(time[(column - 1) % kColumns])) {
        context.fillStyle = this.#colours.line;  // a second
        context.fillRect(x, this.#height, 1, bottom - this.#height);
      }
      const height = Math.max(1, Math.round((milliseconds[at] / this.#top) * full));
      context.fillStyle = promptTokens[at] > 0 ? this.#colours.prompt : this.#colours.decode;
      context.fillRect(x, bottom - height, width, height);
      if (lost[at] > 0) {
        context.fillStyle = this.#colours.broken;
        context.fillRect(x, 0, Math.max(1, Math.round(this.#scale)), bottom);
      }
    }
  }

  // The numbers of the requests that have the rows, or had them last; and the scale of the bars.
  #drawLabels(first) {
    const context = this.#context, left = this.#left, { height } = this.#canvas;
    const x = left - Math.round(6 * this.#scale), size = Math.round(10 * this.#scale);
    const every = Math.ceil((size + 1) / this.#rowHeight), owners = [];
    for (let row = 0; row < kRows && (row + 0.5) * this.#rowHeight + size / 2 <= this.#height; row += every) {
      owners.push(this.#timeline.ownerBefore(this.last, row, first));
    }
    const labels = `${this.#top} ${this.#rowHeight} ${owners}`;
    if (labels === this.#labels) return;
    this.#labels = labels;
    context.fillStyle = this.#colours.back;
    context.fillRect(0, 0, left, height);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = this.#colours.faint;
    context.font = `${size}px system-ui, sans-serif`;
    const top = this.#top < 1000 ? `${this.#top} ms` : `${this.#top / 1000} s`;
    context.fillText(top, x, height - this.#strip + size / 2);
    context.fillText("0", x, height - size / 2);
    owners.forEach((owner, index) => {
      if (owner === null) return;
      context.fillStyle = this.#colours[this.#timeline.own.has(owner) ? "own" : "faint"];
      context.fillText(owner, x, Math.max((index * every + 0.5) * this.#rowHeight, size / 2));
    });
  }
}
