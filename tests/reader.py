"""A report page as a browser would read it."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """What a browser would see: links, scripts, headings, and the tables as lists of (text, bold) cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.rows: list[list[tuple[str, bool]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in {"src", "href", "srcset", "action", "data"}
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in {"th", "td"}:
            self.rows[-1].append(("", False))
        if tag == "b":
            self.rows[-1][-1] = (self.rows[-1][-1][0], True)
        if tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append("/" + tag)

    def handle_data(self, data: str) -> None:
        inside = [tag for tag in ("th", "td") if self.tags.count(tag) > self.tags.count("/" + tag)]
        if inside:
            text, bold = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, bold)
        if self.tags.count("h2") > self.tags.count("/h2"):
            self.headings[-1] += data
        if self.tags.count("script") == self.tags.count("/script"):
            self.text += data
