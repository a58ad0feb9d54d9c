# SPDX-License-Identifier: Apache-2.0
"""The timeline of a folder of recordings: one HTML page with its data and its script, that asks for no other file."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from lowbit.recorder.analysis import Analysis, last_seen
from lowbit.recorder.folder import Folder
from lowbit.recorder.ring import Record, Recording

_MOST_BARS = 20_000
"""Of one page: the last ones of each rank."""


def page(folder: Folder, analysis: Analysis) -> str:
    """Draw each thread of each process as a lane of calls over the time since the first one, on the wall clock."""
    end = max((last_seen(recording) for recording in folder.recordings), default=0)
    begin = min((of.wall(record.start_ns) for of in folder.recordings for record in of.records), default=end)
    share = max(1, _MOST_BARS // max(1, len(folder.recordings)))
    lanes = [lane for recording in folder.recordings for lane in _lanes(recording, begin, end, share, analysis)]
    data = {"lanes": lanes, "seconds": max((end - begin) / 1e9, 1e-6)}
    parts = {
        "verdict": html.escape(analysis.verdict),
        "problems": "".join(f"<li>{html.escape(problem)}</li>" for problem in analysis.problems),
        # "<" in a script could end it, wherever it stands
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{(verdict|problems|data)\}", lambda match: parts[match[1]], _PAGE)


def _lanes(recording: Recording, begin: int, end: int, share: int, analysis: Analysis) -> list[dict[str, Any]]:
    threads: dict[int, list[dict[str, Any]]] = {}
    for record in recording.records[-share:]:
        threads.setdefault(record.thread, []).append(_bar(record, recording, begin, end))
    blamed = recording.rank in analysis.culprits
    return [
        {"name": f"{recording.name}, thread {thread}", "blamed": blamed, "bars": bars}
        for thread, bars in threads.items()
    ]


def _bar(record: Record, recording: Recording, begin: int, end: int) -> dict[str, Any]:
    start = (recording.wall(record.start_ns) - begin) / 1e9
    stop = (recording.wall(record.end_ns) - begin) / 1e9
    if record.state == "started":
        stop = (end - begin) / 1e9
    elif not record.end_ns:  # torch's recorder does not know when a collective of gloo ended
        stop = start
    took = f"{1e3 * (stop - start):.3f} ms" if record.end_ns else "has not ended"
    kind = record.state if record.state != "finished" else "collective" if record.is_collective else "op"
    return {"t": round(start, 9), "d": round(max(stop - start, 0), 9), "k": kind, "x": f"{record}\n{took}"}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>lowbit recorder</title>
<style>
body{font:14px system-ui,sans-serif;margin:16px;color:#222}
h1{font-size:18px;margin:0 0 4px} p{margin:4px 0 10px} ul{color:#a33}
.key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px;vertical-align:-1px}
.op{background:#4a7ebb;fill:#4a7ebb}.collective{background:#57a05a;fill:#57a05a}
.started{background:#d8432b;fill:#d8432b}.failed{background:#8b1a7f;fill:#8b1a7f}
#lanes{display:grid;grid-template-columns:max-content 1fr;gap:3px 8px;align-items:center}
.name{white-space:nowrap;font-size:12px}.blamed{color:#d8432b;font-weight:600}
svg{width:100%;height:26px;background:#f4f4f4;display:block;cursor:crosshair}
#axis{height:18px;background:none}#axis text{font-size:11px;fill:#555}
#tip{position:fixed;display:none;white-space:pre;background:#222;color:#fff;padding:4px 8px;font-size:12px;
border-radius:3px;pointer-events:none;max-width:90vw;z-index:1}
</style></head><body>
<h1>{verdict}</h1><ul>{problems}</ul>
<p class="key">wheel: zoom, drag: move, double click: all
<span class="op"></span>call<span class="collective"></span>collective<span class="started"></span>not ended
<span class="failed"></span>failed</p>
<div id="lanes"></div><div id="tip"></div>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const lanes = document.getElementById("lanes"), tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg", WIDTH = 1000;
const margin = data.seconds * 0.01;
const whole = [-margin, data.seconds + margin];
let view = whole.slice();
const drawn = [];

function make(parent, name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  parent.appendChild(element);
  return element;
}
function row(name, blamed, id) {
  const label = document.createElement("div");
  label.className = blamed ? "name blamed" : "name";
  label.textContent = name;
  lanes.appendChild(label);
  const svg = make(lanes, "svg", {viewBox: `0 0 ${WIDTH} 26`, preserveAspectRatio: "none"});
  if (id) svg.id = id;
  return svg;
}
for (const lane of data.lanes) {
  const svg = row(lane.name, lane.blamed);
  for (const bar of lane.bars) {
    const rect = make(svg, "rect", {y: 3, height: 20, class: bar.k});
    rect.addEventListener("mousemove", event => {
      tip.style.display = "block";
      tip.textContent = bar.x;
      tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = (event.clientY + 14) + "px";
    });
    rect.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    drawn.push([rect, bar]);
  }
}
const axis = row("", false, "axis");
axis.removeAttribute("viewBox");

function place() {
  const scale = WIDTH / (view[1] - view[0]);
  for (const [rect, bar] of drawn) {
    const left = (bar.t - view[0]) * scale, right = (bar.t + bar.d - view[0]) * scale;
    const from = Math.max(left, -1), to = Math.min(right, WIDTH + 1);
    rect.setAttribute("x", from);
    rect.setAttribute("width", to < from ? 0 : Math.max(to - from, 0.8));
  }
  axis.textContent = "";
  const span = view[1] - view[0], power = Math.pow(10, Math.floor(Math.log10(span / 10)));
  const step = [1, 2, 5, 10].map(by => by * power).find(width => span / width <= 10);  // 10 labels do not touch
  for (let i = Math.ceil(view[0] / step); i * step < view[1]; i++) {
    const t = i * step;
    const at = 100 * (t - view[0]) / (view[1] - view[0]);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    make(axis, "text", {x: at + "%", y: 13, "text-anchor": "middle"}).textContent = t.toFixed(digits) + " s";
  }
}
function at(event) {
  const box = axis.getBoundingClientRect();
  return view[0] + (event.clientX - box.left) / box.width * (view[1] - view[0]);
}
lanes.addEventListener("wheel", event => {
  event.preventDefault();
  const t = at(event), by = event.deltaY < 0 ? 0.8 : 1.25;
  view = [t - (t - view[0]) * by, t + (view[1] - t) * by];
  place();
}, {passive: false});
let held = null;
lanes.addEventListener("mousedown", event => { held = at(event); event.preventDefault(); });
addEventListener("mouseup", () => { held = null; });
addEventListener("mousemove", event => {
  if (held === null) return;
  const moved = held - at(event);
  view = [view[0] + moved, view[1] + moved];
  place();
});
lanes.addEventListener("dblclick", () => { view = whole.slice(); place(); });
place();
document.body.dataset.drawn = drawn.length;
</script></body></html>
"""
