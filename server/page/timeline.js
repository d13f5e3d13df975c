// The last iterations, from the records of /timeline, in arrays of fixed size: nothing grows,
// however long it runs. A column is an iteration, a row what a request holds from its arrival to
// its end. The newest column is `count - 1`; column c is at c % kColumns.

export const kColumns = 2048;
export const kRows = 96;

// What a request does in an iteration; and flags of its first and last cell.
export const Phase = { none: 0, waiting: 1, prompt: 2, decode: 3, held: 4, mask: 7, begins: 8, ends: 16, breaks: 32 };

const kEnded = 512;  // requests whose end is remembered: plans that were under way then name them once more
const kOwn = 512;  // requests of the page that are remembered
const kRateSeconds = 2;  // that rates are taken over

export class Timeline {
  count = 0;
  // Cells; that of column c and a row is at (c % kColumns) * kRows + row.
  phase = new Uint8Array(kColumns * kRows);
  tokens = new Uint16Array(kColumns * kRows);
  request = new Float64Array(kColumns * kRows);
  // Columns.
  time = new Float64Array(kColumns);  // seconds
  milliseconds = new Float64Array(kColumns);  // that it took
  iteration = new Float64Array(kColumns);
  promptTokens = new Uint32Array(kColumns);
  decodeTokens = new Uint32Array(kColumns);
  waiting = new Uint32Array(kColumns);
  running = new Uint32Array(kColumns);
  lost = new Uint32Array(kColumns);  // iterations that are missing before it

  limits = { running_limit: 0, queue_limit: 0 };
  now = { time: 0, waiting: 0, running: 0, pages: 0, usedPages: 0 };
  rows = new Array(kRows).fill(null);  // who has it
  own = new Set();  // numbers of the page's own requests, the last ones

  #live = new Map();  // by number: {row, ran, shown, prompt_tokens}
  #ended = new Map();  // by number: as the feed told it
  #lost = 0;

  /** Takes one line of the feed. True: there is a new column. */
  add(line) {
    if (line.running_limit !== undefined) {
      this.limits = line;
      this.#forget();
      return false;
    }
    if (line.lost !== undefined) {
      this.#lost += line.lost;
      this.#forget();  // ends may be among what was missed; those that go on show up again
      return false;
    }
    this.now = { time: line.time, waiting: line.waiting, running: line.running, pages: line.total_pages,
      usedPages: line.total_pages - line.free_pages };
    for (const arrival of line.arrivals) this.#enter(arrival.request, arrival.prompt_tokens);
    const isColumn = line.members.length > 0;
    if (isColumn) this.#addColumn(line);
    for (const end of line.ends) this.#end(end, isColumn);
    return isColumn;
  }

  /** Rows up to the last one that some column from `first` on, or a request now, has. */
  rowsSince(first) {
    let most = this.rows.findLastIndex((owner) => owner !== null) + 1;
    for (let column = Math.max(first, this.count - kColumns, 0); column < this.count; ++column) {
      const base = (column % kColumns) * kRows;
      for (let row = kRows - 1; row >= most; --row) {
        if (this.phase[base + row] !== Phase.none) most = row + 1;
      }
    }
    return most;
  }

  /** Prompt tokens, decode tokens and iterations per second, now. */
  rates() {
    const rates = { prompt: 0, decode: 0, iterations: 0 };
    const oldest = Math.max(0, this.count - kColumns);
    for (let column = this.count - 1; column >= oldest; --column) {
      const at = column % kColumns;
      if (this.time[at] <= this.now.time - kRateSeconds) break;
      rates.prompt += this.promptTokens[at] / kRateSeconds;
      rates.decode += this.decodeTokens[at] / kRateSeconds;
      rates.iterations += 1 / kRateSeconds;
    }
    return rates;
  }

  addOwn(number) {
    this.own.add(number);
    if (this.own.size > kOwn) this.own.delete(this.own.values().next().value);
  }

  /** Who has a row before column `last`, or had it last since `first`; null: nobody. */
  ownerBefore(last, row, first) {
    for (let column = last - 1; column >= Math.max(first, this.count - kColumns, 0); --column) {
      const cell = (column % kColumns) * kRows + row;
      if (this.phase[cell] !== Phase.none) return this.request[cell];
    }
    return null;
  }

  /** If it is known; of a request that runs or ended not long ago. */
  promptTokensOf(number) { return (this.#live.get(number) ?? this.#ended.get(number))?.prompt_tokens; }
  endOf(number) { return this.#ended.get(number); }

  #forget() {
    this.#live.clear();
    this.rows.fill(null);
  }

  #enter(number, prompt_tokens) {
    const entry = { row: this.rows.indexOf(null), ran: false, shown: false, prompt_tokens };
    if (entry.row >= 0) this.rows[entry.row] = number;
    this.#live.set(number, entry);
    return entry;
  }

  // Gives running requests a row before waiting ones.
  #rowFor(entry, number) {
    entry.row = this.rows.indexOf(null);
    for (let row = 0; entry.row < 0 && row < kRows; ++row) {
      const owner = this.#live.get(this.rows[row]);
      if (owner.ran) continue;
      owner.row = -1;
      entry.row = row;
    }
    if (entry.row >= 0) this.rows[entry.row] = number;
  }

  #addColumn(record) {
    const at = this.count++ % kColumns;
    this.phase.fill(Phase.none, at * kRows, (at + 1) * kRows);
    this.time[at] = record.time;
    this.milliseconds[at] = (record.compute + record.sample + record.receive) * 1000;
    this.iteration[at] = record.iteration;
    this.waiting[at] = record.waiting;
    this.running[at] = record.running;
    this.promptTokens[at] = this.decodeTokens[at] = 0;
    this.lost[at] = this.#lost;
    this.#lost = 0;
    const put = (entry, number, phase, tokens) => {
      if (entry.row < 0) return;
      const cell = at * kRows + entry.row;
      this.phase[cell] = phase | (entry.shown ? 0 : Phase.begins);
      this.tokens[cell] = Math.min(tokens, 65535);
      this.request[cell] = number;
      entry.shown = true;
    };
    for (const { request, tokens, phase } of record.members) {
      const prompt = phase === "initiation";
      (prompt ? this.promptTokens : this.decodeTokens)[at] += tokens;
      if (this.#ended.has(request)) continue;
      const entry = this.#live.get(request) ?? this.#enter(request, undefined);
      entry.ran = true;
      if (entry.row < 0) this.#rowFor(entry, request);
      put(entry, request, prompt ? Phase.prompt : Phase.decode, tokens);
    }
    for (let row = 0; row < kRows; ++row) {
      const number = this.rows[row];
      if (number === null || (this.phase[at * kRows + row] & Phase.mask) !== Phase.none) continue;
      const entry = this.#live.get(number);
      put(entry, number, entry.ran ? Phase.held : Phase.waiting, 0);
    }
  }

  #end(end, isColumn) {
    const { request, reason } = end, entry = this.#live.get(request);
    this.#live.delete(request);
    this.#ended.set(request, end);
    if (this.#ended.size > kEnded) this.#ended.delete(this.#ended.keys().next().value);
    if (!entry || entry.row < 0) return;
    this.rows[entry.row] = null;
    if (!isColumn || !entry.shown) return;
    const flag = reason === "stop" || reason === "length" ? Phase.ends : Phase.breaks;
    this.phase[((this.count - 1) % kColumns) * kRows + entry.row] |= flag;
  }
}
