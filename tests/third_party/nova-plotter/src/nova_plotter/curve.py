"""A curve as SVG: points in, text out."""

Points = list[tuple[float, float]]
"""(step, loss)."""
WIDTH, HEIGHT, MARGIN = 800, 400, 20


def picture(training: Points, validation: Points) -> str:
    """An SVG document of a line of at least one point, and of dots."""
    points = [*training, *validation]
    steps, losses = ([point[axis] for point in points] for axis in (0, 1))
    width, height = max(steps) - min(steps) or 1, max(losses) - min(losses) or 1

    def place(step: float, loss: float) -> tuple[str, str]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - min(steps)) / width
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (max(losses) - loss) / height
        return f"{x:.1f}", f"{y:.1f}"

    line = " ".join(",".join(place(*point)) for point in training)
    dots = (f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in (place(*point) for point in validation))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
            f"<title>loss {training[-1][1]:.4f} at step {training[-1][0]:g}</title>",
            f'<polyline fill="none" stroke="#1f5fa8" points="{line}"/>',
            *dots,
            "</svg>\n",
        ]
    )
