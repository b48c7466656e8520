// Draws the unfolded branches, folds, searches, and opens the drawer. The branches are in depth-first order: those below
// branch i are i + 1 .. stop[i] - 1. All that users typed goes into the page by textContent or as glyphs of text.
const ROOT = -1, STEP = 50, NAMED = 3, LISTED = 50
const dark = matchMedia("(prefers-color-scheme: dark)").matches
const ink = dark ? "#dddddd" : "#222222"
let B, T, F, n, shown, own, failed, row = new Map(), ranked, hits = [], hit = -1, rows = 0

function read() {
  [B, T, F] = [branches.data, trials.data, failures.data]
  n = B.node.length
  shown = Uint8Array.from(B.shown)
  own = Array.from({length: n}, () => [])
  for (let t = 0; t < T.leaf.length; t++) own[T.leaf[t]].push(t)
  failed = new Map()
  F.branch.forEach((i, f) => failed.set(i, [...(failed.get(i) ?? []), f]))
  // The children of each branch, those of most trials and of the best results first.
  ranked = new Map()
  for (let i = 0; i < n; i++) ranked.get(B.parent[i])?.push(i) ?? ranked.set(B.parent[i], [i])
  for (const children of ranked.values())
    children.sort((a, b) => B.trials[b] - B.trials[a] || (B.rank[b] ?? -1) - (B.rank[a] ?? -1) || a - b)
}

const number = (value) => value.toLocaleString("en")
const short = (value) => value == null || Number.isNaN(value) ? "" : String(+(+value).toPrecision(5))
const plural = (count, noun) => `${number(count)} ${noun}${count == 1 ? "" : "s"}`
const children = (i) => ranked.get(i) ?? []
const cut = (text, most) => [...text].length <= most ? text : [...text].slice(0, Math.max(1, most - 1)).join("") + "…"

// --- what is drawn --------------------------------------------------------------------------------------------------

// Places the unfolded branches on rows: a child that begins where its parent, the branch drawn before it, ends goes on
// in its row. What is left out below a branch of which some children are drawn has a row of its own after them.
function place() {
  row.clear()
  rows = 0
  const stubs = [], open = []
  let last = ROOT
  const close = (i) => {
    const hidden = children(i).filter((child) => !shown[child])
    if (hidden.length && hidden.length < children(i).length) stubs.push({i, y: rows++, ...sum(hidden)})
  }
  for (let i = 0; i < n; ) {
    while (open.length && B.stop[open.at(-1)] <= i) { close(open.pop()); last = ROOT }
    if (!shown[i]) { i = B.stop[i]; continue }
    const on = last != ROOT && B.parent[i] == last && B.x[i] == B.right[last]
    row.set(i, on ? rows - 1 : rows++)
    open.push(last = i)
    i++
  }
  while (open.length) close(open.pop())
  close(ROOT)
  return stubs
}

const sum = (hidden) => ({
  nodes: hidden.reduce((all, i) => all + B.stop[i] - i, 0),
  trials: hidden.reduce((all, i) => all + B.trials[i], 0),
})
const folded = (count) => `+ ${plural(count.nodes, "node")}, ${plural(count.trials, "trial")}`
let stubs = []

function draw() {
  stubs = place()
  const list = [...row.keys()]
  const most = Math.log(Math.max(2, ...list.map((i) => B.trials[i])))
  const on = new Set(list.filter((i) => row.get(i) == row.get(B.parent[i])).map((i) => B.parent[i]))
  const parted = list.filter((i) => B.parent[i] != ROOT)
  // Bokeh draws nothing for "", so that no row is drawn twice.
  joins.data = {
    x: [...parted.map((i) => B.x[i]), ...stubs.filter((s) => s.i != ROOT).map((s) => B.x[s.i])],
    top: [...parted.map((i) => row.get(B.parent[i])), ...stubs.filter((s) => s.i != ROOT).map((s) => row.get(s.i))],
    bottom: [...parted.map((i) => row.get(i)), ...stubs.filter((s) => s.i != ROOT).map((s) => s.y)],
    rank: [...parted.map((i) => B.rank[i] ?? NaN), ...stubs.filter((s) => s.i != ROOT).map(() => NaN)],
  }
  lines.data = {
    x: list.map((i) => B.x[i]), right: list.map((i) => B.right[i]), y: list.map((i) => row.get(i)),
    rank: list.map((i) => B.rank[i] ?? NaN), width: list.map((i) => 1.5 + 4.5 * Math.log(B.trials[i]) / most),
    label: list.map((i) => cut(B.label[i], 160)), trials: list.map((i) => B.trials[i]),
    state: list.map((i) => B.state[i]), value: list.map((i) => short(B.value[i])), node: list.map((i) => B.node[i]),
  }
  const best = list.filter((i) => B.best[i]), down = best.filter((i) => B.parent[i] != ROOT)
  const leaves = new Map(down.map((i) => [B.parent[i], B.x[i]])) // where the way leaves a branch
  way.data = {
    x: [...best, ...down].map((i) => B.x[i]),
    y: [...best.map((i) => row.get(i)), ...down.map((i) => row.get(B.parent[i]))],
    right: [...best.map((i) => leaves.get(i) ?? B.right[i]), ...down.map((i) => B.x[i])],
    bottom: [...best, ...down].map((i) => row.get(i)),
  }
  const forks = list.filter((i) => children(i).length)
  knobs.data = {
    x: [...forks.map((i) => B.x[i]), ...stubs.map((s) => s.i == ROOT ? 0 : B.x[s.i])],
    y: [...forks.map((i) => row.get(i)), ...stubs.map((s) => s.y)],
    mark: [...forks.map((i) => children(i).some((c) => shown[c]) ? "square" : "square_cross"),
           ...stubs.map(() => "square_cross")],
  }
  const broken = list.filter((i) => B.state[i] == "failed")
  crosses.data = {
    x: broken.map((i) => Math.min(B.right[i], ...(failed.get(i) ?? []).map((f) => F.step[f]))),
    y: broken.map((i) => row.get(i)),
  }
  const said = list.filter((i) => !on.has(i))
  ends.data = {
    x: [...said.map((i) => B.right[i]), ...stubs.map((s) => s.i == ROOT ? 0 : B.x[s.i])],
    y: [...said.map((i) => row.get(i)), ...stubs.map((s) => s.y)],
    text: [...said.map(end), ...stubs.map((s) => folded(s))],
  }
  ring()
  const height = Math.min(options.tallest, options.around + options.row * (rows + 1))
  if (fig.height != height) fig.height = height
  fig.y_range.setv({start: rows, end: -1})
  label()
}

// What is written after a branch: the trials that end there, their metric, and what is folded away.
function end(i) {
  const names = own[i].slice(0, NAMED).map((t) => T.name[t]).join(", ")
  const more = own[i].length > NAMED ? ` + ${number(own[i].length - NAMED)}` : ""
  const parts = []
  const values = new Set(own[i].map((t) => short(T.value[t]))) // trials that end at different steps of it differ
  if (own[i].length) parts.push(`trial${own[i].length > 1 ? "s" : ""} ${names}${more}`, values.size == 1 ? [...values][0] : "")
  if (children(i).length && !children(i).some((c) => shown[c])) parts.push(folded(sum(children(i))))
  return parts.filter(Boolean).join("  ")
}

// The labels of partings, as long as there is room for them on the screen.
function label() {
  const {start, end} = fig.x_range, pixels = (fig.inner_width || 900) / (end - start)
  const tall = (fig.inner_height || 1) / Math.abs(fig.y_range.start - fig.y_range.end) >= 14
  const list = tall ? [...row.keys()] : []
  const next = new Map() // where another branch goes on in the row of a branch
  for (const i of row.keys()) if (row.get(i) == row.get(B.parent[i])) next.set(B.parent[i], B.x[i])
  const room = (i) => Math.floor(((next.get(i) ?? end) - Math.max(start, B.x[i])) * pixels / 6.2) - 1
  const named = list.filter((i) => B.label[i] && room(i) > 3)
  texts.data = {
    x: named.map((i) => B.x[i]), y: named.map((i) => row.get(i)),
    text: named.map((i) => cut(B.label[i], Math.min(110, room(i)))),
  }
}

function ring() {
  const at = hits.map((t) => T.leaf[t]).filter((i) => row.has(i))
  found.data = {x: at.map((i) => B.right[i]), y: at.map((i) => row.get(i))}
}

// --- folding and searching ------------------------------------------------------------------------------------------

function reveal(i) {
  for (; i != ROOT && !shown[i]; i = B.parent[i]) shown[i] = 1
}

function unfold(i) {
  children(i).filter((child) => !shown[child]).slice(0, STEP).forEach((child) => { shown[child] = 1 })
  draw()
}

function toggle(i) {
  if (children(i).some((child) => shown[child])) { shown.fill(0, i + 1, B.stop[i]); draw() } else unfold(i)
}

function matches(text) {
  const query = text.trim().toLowerCase()
  if (!query) return () => false
  const trial = query.match(/^(?:trial\s+)?#?(\d+)$/)
  if (trial) return (t) => T.name[t] == trial[1]
  const [name, value] = query.split(/\s*=\s*/)
  if (value !== undefined)
    return (t) => Object.entries(JSON.parse(T.params[t])).some(([key, own]) => {
      const text = String(own).toLowerCase()
      return key.toLowerCase() == name && (text == value || (value && Number(text) == Number(value)))
    })
  if (["failed", "complete", "pruned", "running"].includes(query)) return (t) => T.state[t] == query
  return (t) => T.params[t].toLowerCase().includes(query) || B.label[T.leaf[t]].toLowerCase().includes(query)
}

function find(text) {
  const test = matches(text)
  hits = [...T.leaf.keys()].filter(test)
  hit = -1
  hits.slice(0, STEP).forEach((t) => reveal(T.leaf[t]))
  search.title = text.trim() ? `${plural(hits.length, "trial")} found; Enter opens the next` : "Find trials"
  draw()
}

function next() {
  if (!hits.length) return
  hit = (hit + 1) % hits.length
  reveal(T.leaf[hits[hit]])
  draw()
  open(T.leaf[hits[hit]], hits[hit])
  // Its row comes to the middle of the window, where the tree is longer than that.
  const element = Bokeh.index.get_by_id?.(fig.id)?.el ?? document.body
  const top = element.getBoundingClientRect().top + scrollY + options.row * (row.get(T.leaf[hits[hit]]) + 1)
  scrollTo({top: top - innerHeight / 2})
}

// --- the drawer -----------------------------------------------------------------------------------------------------

const drawer = document.createElement("aside")
drawer.className = "hpstage-drawer"
drawer.hidden = true
const sheet = document.createElement("style")
sheet.textContent = `.hpstage-drawer { position: fixed; z-index: 1000; top: 0; right: 0; bottom: 0; width: min(420px, 100%);
  box-sizing: border-box; overflow: auto; padding: 12px 16px; font: 13px/1.45 system-ui, sans-serif;
  background: ${dark ? "#1d1f21" : "#ffffff"}; color: ${ink}; box-shadow: 0 0 14px #0006; overflow-wrap: anywhere }
.hpstage-drawer[hidden] { display: none } .hpstage-drawer h2 { font-size: 15px; margin: 0 32px 4px 0 }
.hpstage-drawer h3 { font-size: 13px; margin: 14px 0 2px } .hpstage-drawer p { margin: 2px 0 }
.hpstage-drawer pre, .hpstage-drawer code { font: 12px/1.4 ui-monospace, monospace; white-space: pre-wrap; user-select: all }
.hpstage-drawer pre { max-height: 22em; overflow: auto; border-left: 3px solid #d55e00; padding-left: 8px }
.hpstage-drawer dl { display: grid; grid-template-columns: minmax(5em, max-content) minmax(60%, 1fr); gap: 1px 12px; margin: 2px 0 }
.hpstage-drawer dt { opacity: .7 } .hpstage-drawer dd { margin: 0 }
.hpstage-drawer button { position: absolute; top: 8px; right: 10px; font: 20px/1 sans-serif; border: 0; background: none;
  color: inherit; cursor: pointer } .hpstage-drawer svg { display: block; width: 100%; height: 46px }`
document.head.append(sheet)
document.body.append(drawer)
document.addEventListener("keydown", (event) => { if (event.key == "Escape") drawer.hidden = true })

function element(kind, text, ...inside) {
  const made = document.createElement(kind)
  if (text != null) made.textContent = text
  made.append(...inside)
  return made
}

const pairs = (entries) => element("dl", null, ...entries.filter(([, value]) => value !== "").flatMap(
  ([name, value]) => [element("dt", name), element("dd", value)]))

function curve(points) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline")
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])]
  const [low, high, last] = [Math.min(...ys), Math.max(...ys), Math.max(1, xs.at(-1))]
  svg.setAttribute("viewBox", "0 0 200 46")
  svg.setAttribute("preserveAspectRatio", "none")
  line.setAttribute("points", points.map(([x, y]) => `${200 * x / last},${43 - 40 * (y - low) / (high - low || 1)}`).join(" "))
  for (const [name, value] of [["fill", "none"], ["stroke", "#2a9d8f"], ["stroke-width", "1.5"], ["vector-effect", "non-scaling-stroke"]])
    line.setAttribute(name, value)
  svg.append(line)
  return svg
}

function card(t) {
  const parts = [element("h3", `Trial ${T.name[t]}: ${[T.state[t], options.metric && `${cut(options.metric, 60)} ${short(T.value[t])}`].filter(Boolean).join(", ")}`)]
  parts.push(pairs(Object.entries(JSON.parse(T.params[t]))))
  for (const [name, points] of Object.entries(JSON.parse(T.curves[t]))) {
    const ys = points.map((p) => p[1])
    parts.push(element("p", `${name}: ${short(ys[0])} to ${short(ys.at(-1))} (${short(Math.min(...ys))} to ${short(Math.max(...ys))})`), curve(points))
  }
  parts.push(element("p", `${short(T.seconds[t])} s of training paid for by it`))
  return parts
}

// What the line down to a branch has logged, as curves, and what the branch has printed.
function logged(i) {
  const L = logs.data, parts = [], way = [], curves = new Map()
  for (let above = i; above != ROOT; above = B.parent[above]) way.unshift(above)
  for (const branch of way) {
    const at = L.branch.indexOf(branch)
    if (at == -1) continue
    for (const [name, points] of Object.entries(JSON.parse(L.curves[at])))
      curves.set(name, [...(curves.get(name) ?? []).filter((p) => p[0] < B.x[branch]), ...points])
  }
  for (const [name, points] of curves)
    parts.push(element("p", `${name}: ${short(points[0][1])} to ${short(points.at(-1)[1])}`), curve(points))
  if (parts.length) parts.unshift(element("h3", "Logged on the way to its end"))
  const own = L.branch.indexOf(i)
  if (own != -1 && L.output[own]) {
    parts.push(element("h3", "Printed on this branch"), element("pre", L.output[own]))
    parts.at(-1).style.borderColor = "#888888"
  }
  return parts
}

function open(i, only) {
  const close = element("button", "×")
  close.setAttribute("aria-label", "Close")
  close.onclick = () => { drawer.hidden = true }
  const parts = [close, element("h2", `Node ${B.node[i]}, ${B.state[i]}`), pairs([
    ["steps", `${number(B.x[i])} to ${number(B.right[i])}`], [B.parent[i] == ROOT ? "trains with" : "changes", B.label[i]],
    ["trials", number(B.trials[i])], ["best from here", short(B.value[i])], ["checkpoint", B.kept[i]],
  ])]
  // What failed on the branch or, for a single trial, on the way to it.
  for (let above = i; above != ROOT; above = B.parent[above])
    for (const f of failed.get(above) ?? []) {
      parts.push(element("h3", `Failed when ${F.doing[f]}, step ${number(F.step[f])}, node ${B.node[above]}`), element("p", F.summary[f]))
      if (F.traceback[f]) parts.push(element("pre", F.traceback[f]))
    }
  parts.push(...logged(i))
  let through = [...T.leaf.keys()].filter((t) => T.leaf[t] >= i && T.leaf[t] < B.stop[i])
  if (only !== undefined) through = [only, ...through.filter((t) => t != only)]
  through.slice(0, LISTED).forEach((t) => parts.push(...card(t)))
  if (through.length > LISTED) parts.push(element("p", `and ${number(through.length - LISTED)} more trials`))
  const study = options.study ? ` --study '${options.study.replaceAll("'", "'\\''")}'` : ""
  parts.push(element("h3", "In a terminal"))
  for (const command of ["tree", "status", "report"])
    parts.push(element("p", null, element("code", `hpstage ${command} STORE${command == "status" ? "" : study}`)))
  drawer.replaceChildren(...parts)
  drawer.scrollTop = 0
  drawer.hidden = false
}

// A click on a square, or on the text of what is folded, unfolds; elsewhere on a branch it opens the drawer.
function tap(x, y) {
  const width = (fig.x_range.end - fig.x_range.start) / (fig.inner_width || 900)
  const stub = stubs.find((s) => Math.abs(s.y - y) < 0.5)
  if (stub) return unfold(stub.i)
  const near = [...row.keys()].filter((i) => Math.abs(row.get(i) - y) < 0.7)
  const knob = near.find((i) => children(i).length && Math.abs(B.x[i] - x) < 9 * width)
  if (knob !== undefined) return toggle(knob)
  const gap = (i) => Math.max(B.x[i] - x, x - B.right[i], 0) / width + 30 * Math.abs(row.get(i) - y)
  const at = near.sort((a, b) => gap(a) - gap(b))[0]
  if (at === undefined) { drawer.hidden = true; return }
  const closed = children(at).length && !children(at).some((c) => shown[c])
  if (closed && x > B.right[at]) return unfold(at)
  open(at)
}

for (const axis of fig.below.concat(fig.left)) axis.setv({axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: "#888888"})
for (const renderer of fig.renderers) if (["texts", "ends"].includes(renderer.name)) renderer.glyph.text_color = {value: ink}
fig.hpstage = {tap, find, next, toggle, unfold, shown: () => [...row.keys()], rows: () => Object.fromEntries([...row].map(([i, y]) => [B.node[i], y]))}
// Room for what is written after the last step, on a narrow screen as well.
fig.x_range.setv({end: fig.x_range.end / 1.15 * (1 + Math.min(0.7, 180 / document.documentElement.clientWidth))})
let waiting = 0
for (const property of [fig.x_range.properties.start, fig.x_range.properties.end, fig.y_range.properties.start, fig.y_range.properties.end, fig.properties.inner_width])
  property?.change.connect(() => { clearTimeout(waiting); waiting = setTimeout(label, 40) })
branches.properties.data.change.connect(() => { read(); draw() })
read()
draw()
