"""How long the page takes for what a user does with its tree, in a browser. For scripts/bench_dashboard.py.

A gesture lasts from its event until the frame after the next one is drawn, which is 33 ms where nothing is to be done.
"""

from __future__ import annotations

import statistics
from typing import Any

from screenshots import browser

_TIMEOUT = 300_000  # milliseconds
_REPEATED = 8

# Each takes the tree of a figure, and what is done the k-th time.
GESTURES = {
    "unfold": "(fig, tree, k) => tree.unfold(tree.shown().find(i => tree.about(i).folded))",
    "pan": "(fig, tree, k) => wheel(fig, {deltaY: k % 2 ? -300 : 300})",
    "zoom": "(fig, tree, k) => wheel(fig, {deltaY: k % 2 ? 100 : -100, ctrlKey: true})",
    "fold": "(fig, tree, k) => tree.toggle(tree.order()[0])",
    "search": "(fig, tree, k) => tree.find(['lr=0.1', 'trial 17', '', 'complete', 'gamma', '0.02', ''][k % 7])",
    "click": "(fig, tree, k) => { const at = tree.place(tree.shown()[k]); tree.tap((at.x + at.right) / 2, at.y) }",
}

_MEASURE = """async ([gesture, times]) => {
  const fig = Bokeh.documents.flatMap(d => [...d._all_models.values()]).find(model => model.hpstage)
  const wheel = (fig, how) => Bokeh.index.find_one(fig).el.dispatchEvent(
    new WheelEvent("wheel", {bubbles: true, cancelable: true, clientX: 500, clientY: 400, ...how}))
  const act = eval(gesture), frame = () => new Promise(requestAnimationFrame), found = []
  const painted = () => new Promise((done) => { const {port1, port2} = new MessageChannel()
    port1.onmessage = done; port2.postMessage(0) })
  for (let k = 0; k < times; k++) {
    await new Promise((done) => setTimeout(done, 300))
    await frame()
    const began = performance.now()
    act(fig, fig.hpstage, k)
    await frame()
    await frame()
    await painted()
    found.push(performance.now() - began)
  }
  return found
}"""


def measure(address: str, trials: int) -> dict[str, float]:
    """Return the median milliseconds of each gesture on the page at ``address``, and the slowest ones (``..._max``);
    ``load_s``: seconds until the page had all of its tree."""
    with browser() as opened:
        page: Any = opened.new_page(viewport={"width": 1400, "height": 950})
        page.set_default_timeout(_TIMEOUT)
        page.goto(address)
        began = page.evaluate("() => performance.now()")
        page.wait_for_function(
            """trials => Bokeh.documents.some(d => [...d._all_models.values()].some(
                model => model.hpstage?.size().trials >= trials))""",
            arg=trials,
        )
        found = {"load_s": (page.evaluate("() => performance.now()") - began) / 1000}
        page.wait_for_timeout(1000)
        for name, gesture in GESTURES.items():
            times = page.evaluate(_MEASURE, [gesture, _REPEATED])
            found |= {f"{name}_ms": statistics.median(times), f"{name}_max_ms": max(times)}
        page.close()
    return found
