#!/usr/bin/env bash
# Prints the path of a real English text for measuring quality, and makes it in the user's cache first if it is not there: the Debian
# Administrator's Handbook (package debian-handbook, GPL-2+ or CC-BY-SA 3.0), in reading order, without markup. Its sha256 goes to stderr;
# results name it. The package is downloaded, not installed; DEB=/path/to/debian-handbook_VERSION_all.deb uses one that is at hand.
set -euo pipefail
hash=8985dff81f0dc858992a376c8b6329de19d7e710352e153f2584391f5a4e764e  # of version 11.20220922 (Debian 12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/treadle
file=${1:-$cache/debian-handbook.txt}

if [ ! -s "$file" ]; then
  mkdir -p "$(dirname "$file")"
  partial=$(mktemp -d "$(dirname "$file")/fetch.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  deb=${DEB:-}
  if [ -z "$deb" ]; then
    echo "Fetching the Debian package debian-handbook (35 MB)" >&2
    (cd "$partial" && apt-get -qq -o APT::Sandbox::User=root download debian-handbook) || {
      echo "Could not fetch it with 'apt-get download debian-handbook'; pass the package as DEB=FILE." >&2
      exit 1
    }
    deb=$(echo "$partial"/debian-handbook_*.deb)
  fi
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$partial" --wildcards './usr/share/doc/debian-handbook/html/en-US/*.html'
  python3 - "$partial/usr/share/doc/debian-handbook/html/en-US" "$partial/text" <<'PYTHON'
import html.parser, pathlib, re, sys

# Elements whose ends end a line.
BLOCKS = {"div", "p", "li", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "tr", "table", "ul", "ol", "dl"}
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(html.parser.HTMLParser):
    """The text of one page, without its head and navigation, and the page after it."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.pieces, self.skipping, self.verbatim, self.next = [], 0, 0, None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "link" and attributes.get("rel") == "next":
            self.next = attributes["href"]
        if tag in VOID:
            return
        classes = (attributes.get("class") or "").split()
        navigation = tag == "head" or "docnav" in classes or attributes.get("id") in ("banner", "title") or "toc" in classes
        if self.skipping or navigation:
            self.skipping += 1
        self.verbatim += tag == "pre"
        if tag in BLOCKS | {"pre"}:
            self.pieces.append("\n")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        self.skipping -= self.skipping > 0
        self.verbatim -= tag == "pre"
        if tag in BLOCKS | {"pre"}:
            self.pieces.append("\n")

    def handle_data(self, data):
        if not self.skipping:
            self.pieces.append(data if self.verbatim else re.sub(r"\s+", " ", data))

    def text(self):
        lines = (line.strip() if line.startswith(" ") else line.rstrip() for line in "".join(self.pieces).split("\n"))
        return "\n\n".join(line for line in lines if line)


folder, out = pathlib.Path(sys.argv[1]), sys.argv[2]
pages, name = [], "preface.html"
while name:
    page = Page((folder / name).read_text(encoding="utf-8"))
    pages.append(page.text())
    name = page.next
pathlib.Path(out).write_text("\n\n".join(pages) + "\n", encoding="utf-8")
PYTHON
  mv "$partial/text" "$file"
fi
found=$(sha256sum "$file" | cut -d' ' -f1)
echo "sha256 $found" >&2
[ "$found" = "$hash" ] || echo "Another version of the text than the one of the kept results ($hash): compare with care." >&2
echo "$file"
