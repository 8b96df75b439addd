"""Pictures as SVG, in a light and in a dark scheme, with the fonts of the reader's system."""

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Scheme:
    """The colours of a picture."""

    name: str
    back: str
    text: str
    muted: str
    edge: str
    red: str
    blue: str
    pale: str
    amber: str


LIGHT = Scheme(
    "light", back="#ffffff", text="#1c1f24", muted="#555b66", edge="#dde1e7", red="#c62828",
    blue="#0067a8", pale="#9cc8e6", amber="#7a4f00",
)  # fmt: skip
DARK = Scheme(
    "dark", back="#0d1117", text="#e8eaee", muted="#a7adb8", edge="#30363d", red="#ff7b72",
    blue="#58b4f5", pale="#23527c", amber="#ffcf70",
)  # fmt: skip


@dataclass
class Picture:
    """A picture that grows by its calls. Positions are pixels from the left and the top."""

    scheme: Scheme
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, color: str = "", size: int = 15,
        weight: int = 400, anchor: str = "start",
    ) -> None:  # fmt: skip
        """Words on the baseline y, with an outline in the background's colour."""
        if not words:
            return
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{color or self.scheme.text}" '
            f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
            f'stroke="{self.scheme.back}" stroke-width="4" paint-order="stroke">'
            f"{escape(words)}</text>"
        )

    def line(
        self, points: list[tuple[float, float]], color: str, *, width: float = 2, dash: str = ""
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{_pairs(points)}" fill="none" stroke="{color}" '
            f'stroke-width="{width}" stroke-linejoin="round"{dashed}/>'
        )

    def area(self, points: list[tuple[float, float]], color: str, opacity: float = 1) -> None:
        self.parts.append(
            f'<polygon points="{_pairs(points)}" fill="{color}" fill-opacity="{opacity}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{color}"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}" '
            f'stroke="{self.scheme.back}" stroke-width="2"/>'
        )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'{size} role="img" font-family="{FONT}">'
        )
        back = f'<rect {size} rx="6" fill="{self.scheme.back}"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, back, *self.parts, "</svg>\n"])


def _pairs(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
