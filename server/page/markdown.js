// The Markdown of an answer as elements of the page. It makes nodes, never HTML, so whatever a model writes is text
// within one of the elements named here, or a link to http or https. It takes time linear in the text.

const kDeepest = 6;  // quotes, lists and emphasis within each other; what is deeper stays as it was written

const kFence = /^ *(`{3,}|~{3,})/;
const kItem = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/s;
const kHeading = /^ {0,3}(#{1,6}) +(.*)$/s;
const kQuote = /^ {0,3}> ?(.*)$/s;
const kRuled = /^(-{3,}|\*{3,}|_{3,})$/;  // without its spaces
const kSpecial = /[\\`*_~[!<]|https?:\/\//g;
const kLink =
  /!?\[([^[\]\n]{1,500})\]\((https?:\/\/(?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})(?: +"[^"\n]{0,200}")?\)/y;
const kBareLink = /<(https?:\/\/[^\s<>]{1,2000})>|https?:\/\/[^\s<>"`]{0,2000}[^\s<>"`.,;:!?)'*_\]]/y;
const kBreak = /<br ?\/?>/iy;

function make(parent, tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// -- within a line --------------------------------------------------------------------------------

function addLink(parent, text, url) {
  const link = make(parent, "a", text);
  link.href = url;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

const isWord = (character) => /[\p{L}\p{N}]/u.test(character ?? "");
const isSpace = (character) => character === undefined || /\s/.test(character);

/** Where `mark`, which opens at `from` - mark.length, closes; -1 if it does not. */
function closeOf(text, mark, from) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + mark.length)) {
    const after = text[at + mark.length];
    if (mark[0] === "`") {
      if (text[at - 1] !== "`" && after !== "`") return at;
      continue;
    }
    if (mark.length === 1 && after === mark) ++at;  // the two of a strong text within this one
    else if (!isSpace(text[at - 1]) && !(mark[0] === "_" && isWord(after))) return at;
  }
  return -1;
}

const kEmphasis = { "***": "strong", "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };

function addEmphasis(parent, mark, text, depth) {
  const made = make(parent, kEmphasis[mark]);
  addInline(mark === "***" ? make(made, "em") : made, text, depth);
}

function addInline(parent, text, depth) {
  const open = new Set();  // marks that nothing closes from here on
  let plain = 0;  // what was not added yet begins here
  const flush = (end) => { if (end > plain) parent.append(text.slice(plain, end)); };
  kSpecial.lastIndex = 0;
  for (let found; (found = kSpecial.exec(text)) !== null;) {
    const at = found.index, character = text[at];
    let end = at;  // of what was understood
    for (const pattern of [kLink, kBareLink, kBreak]) {
      pattern.lastIndex = at;
      const match = pattern.exec(text);
      if (!match) continue;
      flush(at);
      if (pattern === kBreak) make(parent, "br");
      else if (pattern === kLink) addLink(parent, match[1], match[2]);
      else addLink(parent, match[1] ?? match[0], match[1] ?? match[0]);
      end = pattern.lastIndex;
      break;
    }
    let mark = character;
    if (end > at) {
      // done
    } else if (character === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      flush(at);
      plain = at + 1;
      kSpecial.lastIndex = at + 2;
      continue;
    } else if ("`*_~".includes(character)) {
      while (text[at + mark.length] === character) mark += character;
      const inner = at + mark.length;
      const code = character === "`";
      const opens = code || (mark in kEmphasis && depth < kDeepest && !isSpace(text[inner]) &&
                             !(character === "_" && isWord(text[at - 1])));
      const close = opens && !open.has(mark) ? closeOf(text, mark, inner) : -1;
      if (opens && close < 0) open.add(mark);
      if (close > inner) {
        flush(at);
        const content = text.slice(inner, close);
        if (code) make(parent, "code", content.trim() === "" ? content : content.replace(/^ (.*) $/s, "$1"));
        else addEmphasis(parent, mark, content, depth + 1);
        end = close + mark.length;
      }
    }
    if (end > at) plain = end;
    kSpecial.lastIndex = Math.max(end, at + mark.length);  // an inner call has moved it
  }
  flush(text.length);
}

// -- blocks ---------------------------------------------------------------------------------------

function addCode(parent, language, code) {
  const figure = make(parent, "figure"), bar = make(figure, "figcaption");
  make(bar, "span", language || "text");
  const copy = make(bar, "button", "Copy");
  copy.type = "button";
  const shown = make(make(figure, "pre"), "code", code);
  copy.addEventListener("click", () => copyText(code, shown).then((said) => { copy.textContent = said; }));
}

/** Copies `text`, which `shown` shows; gives what to tell. */
export async function copyText(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {  // pages that came without TLS from another machine may not
    getSelection().selectAllChildren(shown);
    return "Selected: copy it with Ctrl+C";
  }
}

const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");

function addTable(parent, lines, depth) {
  const table = make(make(parent, "div"), "table");
  table.parentElement.className = "table";
  lines.forEach((line, row) => {
    if (row === 1) return;  // the rule
    const shown = make(table, "tr");
    for (const cell of cellsOf(line)) addInline(make(shown, row === 0 ? "th" : "td"), cell.trim(), depth);
  });
}

/** The items of a list that begins at `from`; gives the line behind it. */
function addList(parent, lines, from, depth) {
  const [, indent, first] = kItem.exec(lines[from]);
  const ordered = /\d/.test(first), list = make(parent, ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(first, 10);
  let at = from;
  while (at < lines.length) {
    const item = kItem.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]], width = item[1].length;
    for (++at; at < lines.length; ++at) {
      const next = kItem.exec(lines[at]), spaces = lines[at].search(/[^ ]|$/);
      if (next ? spaces <= width + 1 : spaces <= width && startsBlock(lines, at)) break;
      inner.push(lines[at].slice(Math.min(spaces, width + 2)));
    }
    addLines(make(list, "li"), inner, depth + 1);
  }
  return at;
}

const isTableRule = (line) => /^[ |:-]+$/.test(line) && line.includes("|") && line.includes("-");
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && isTableRule(lines[at + 1]);
const isRule = (line) => kRuled.test(line.replaceAll(" ", ""));
const startsBlock = (lines, at) => kHeading.test(lines[at]) || kQuote.test(lines[at]) || kItem.test(lines[at]) ||
  isRule(lines[at]) || isTable(lines, at);

/** Lines of which none is empty or part of a code block. */
function addLines(parent, lines, depth) {
  const deep = depth >= kDeepest;
  for (let at = 0; at < lines.length;) {
    const from = at, heading = kHeading.exec(lines[at]);
    if (isRule(lines[at])) {
      make(parent, "hr");
      ++at;
    } else if (heading) {
      addInline(make(parent, `h${Math.min(heading[1].length + 2, 6)}`), heading[2], depth);
      ++at;
    } else if (!deep && kQuote.test(lines[at])) {
      while (at < lines.length && kQuote.test(lines[at])) ++at;
      addLines(make(parent, "blockquote"), lines.slice(from, at).map((line) => kQuote.exec(line)[1]), depth + 1);
    } else if (!deep && kItem.test(lines[at])) {
      at = addList(parent, lines, at, depth);
    } else if (isTable(lines, at)) {
      while (at < lines.length && lines[at].includes("|")) ++at;
      addTable(parent, lines.slice(from, at), depth);
    } else {
      do ++at; while (at < lines.length && (deep || !startsBlock(lines, at)));
      addInline(make(parent, "p"), lines.slice(from, at).join("\n"), depth);
    }
  }
}

/** The line that opens or closes a block of code: its mark, and the language behind it. */
function fenceOf(line) {
  const found = kFence.exec(line);
  if (!found) return null;
  const rest = line.slice(found[0].length);
  return rest.includes("`") ? null : { mark: found[1], language: rest.trim().split(/\s/, 1)[0].slice(0, 40) };
}

/** The text's parts: a block of code, or lines up to an empty one. */
function partsOf(text) {
  const parts = [];
  let lines = [];
  const flush = () => { if (lines.length > 0) parts.push({ lines }); lines = []; };
  let code = null;
  for (const line of text.split("\n")) {
    if (code) {
      const end = fenceOf(line);
      if (end && end.language === "" && end.mark.startsWith(code.mark)) code = null;
      else code.lines.push(line.slice(Math.min(code.indent, line.search(/[^ ]|$/))));
      continue;
    }
    const fence = fenceOf(line);
    if (fence || line.trim() === "") flush();
    else lines.push(line);
    if (!fence) continue;
    code = { ...fence, indent: line.search(/[^ ]/), lines: [] };
    parts.push(code);
  }
  flush();
  return parts;
}

const sourceOf = (part) => `${part.mark ?? ""}${part.language ?? ""}\n${part.lines.join("\n")}`;

/** Shows a text that grows: only parts that have changed are made anew. */
export class Markdown {
  #parent;
  #shown = [];  // {source, nodes}

  constructor(parent) { this.#parent = parent; }

  show(text) {
    const parts = partsOf(text), shown = this.#shown;
    let same = 0;
    while (same < Math.min(shown.length, parts.length) && shown[same].source === sourceOf(parts[same])) ++same;
    for (const { nodes } of shown.splice(same)) for (const node of nodes) node.remove();
    for (const part of parts.slice(same)) {
      const made = document.createDocumentFragment();
      if (part.mark) addCode(made, part.language, part.lines.join("\n"));
      else addLines(made, part.lines, 0);
      shown.push({ source: sourceOf(part), nodes: [...made.childNodes] });
      this.#parent.append(made);
    }
  }
}
