// Draws the visible part of the unfolded branches. All text of users is drawn as text glyphs.
const PITCH = 15, WIDEST = 26 // minimum and maximum height of a row in pixels
const FONT = "11px system-ui, sans-serif", AT_THE_END = 3, LEAST = 6 // trials named; characters that a cut text keeps
const pen = document.createElement("canvas").getContext("2d")
pen.font = FONT

const format = new Intl.NumberFormat("en")
const number = (value) => format.format(value)
const short = (value) => value == null || Number.isNaN(value) ? "" : String(+(+value).toPrecision(5))
const plural = (count, noun) => `${number(count)} ${noun}${count == 1 ? "" : "s"}`
const folded = ({nodes, trials}) => `+ ${number(nodes)} ${nodes == 1 ? "branch" : "branches"}, ${plural(trials, "trial")}`
const cut = (text, most) => [...text].length <= most ? text : [...text].slice(0, Math.max(1, most - 1)).join("") + "…"

// Returns the text cut to at most `room` pixels; "" if too little of it would be left.
function fitting(text, room) {
  if (!text || room < 12) return ""
  if (pen.measureText(text).width <= room) return text
  text = text.replace(/ \S+ → /g, " → ") // earlier values can be seen on the parent
  const width = pen.measureText(text).width
  if (width <= room) return text
  const most = Math.floor([...text].length * (room - 8) / width), [, name, value] = text.match(/^(\S+)( → \S+)$/) || []
  if (name && most >= value.length + 3) return cut(name, most - value.length) + value
  return most < LEAST ? "" : cut(text, most)
}

const wide = () => fig.inner_width || 900
const tall = () => fig.inner_height || options.height - 60
const pitch = () => tall() / (fig.y_range.start - fig.y_range.end)
const pixels = () => wide() / (fig.x_range.end - fig.x_range.start)

let from = 0, to = 0 // the rows that are drawn
let seen = [], ends = [] // the branches and the stubs on these rows
let scales = "", steps = "" // the scale of the drawn rows, and the steps of the drawn labels

// Returns the text at the end of a branch: the trials that end there, their metric, and the number of folded branches.
// Of successive trials of one study, the first is named with it.
function end(i) {
  const study = (t) => T.name[t].slice(0, T.name[t].lastIndexOf("/") + 1)
  const names = ending[i].slice(0, AT_THE_END).map((t, k, all) => T.name[t].slice(k && study(t) == study(all[k - 1]) ? study(t).length : 0)).join(", ")
  const more = ending[i].length > AT_THE_END ? ` + ${number(ending[i].length - AT_THE_END)}` : ""
  const values = new Set(ending[i].map((t) => short(T.value[t]))) // trials that end at different steps of it differ
  const parts = []
  if (ending[i].length) parts.push(`trial${ending[i].length > 1 ? "s" : ""} ${names}${more}`, values.size == 1 ? [...values][0] : "")
  if (isFolded(i)) parts.push(folded(sum(children(i))))
  return parts.filter(Boolean).join("  ")
}

// Redraws all if the window has left the drawn rows or its scale has changed; only the labels if the steps have changed.
function redraw() {
  if (fig.y_range.end < from || fig.y_range.start > to || scales != drawnScale()) return draw()
  if (steps != drawnSteps()) label()
}

const drawnScale = () => pitch().toPrecision(6)
const drawnSteps = () => [fig.x_range.start, fig.x_range.end, wide()].join()

function draw() {
  const span = fig.y_range.start - fig.y_range.end, over = span > 400 ? 0 : span
  from = fig.y_range.end - over
  to = fig.y_range.start + over
  const inside = (y) => y >= from && y <= to
  seen = list.filter((i) => inside(row[i]))
  ends = stubs.filter((stub) => inside(stub.y))
  scales = drawnScale()
  const most = Math.log(Math.max(2, ...roots.map((i) => B.trials[i])))
  const column = (keys) => Object.fromEntries(Object.entries(keys).map(([key, value]) => [key, seen.map(value)]))
  lines.data = column({
    x: (i) => B.x[i], right: (i) => B.right[i], y: (i) => row[i], front: (i) => Math.min(B.right[i], Math.max(B.front[i], running.get(i) ?? 0)),
    rank: (i) => rank.get(i), width: (i) => 1.5 + 4.5 * Math.log(B.trials[i]) / most, label: (i) => cut(B.label[i], 160),
    trials: (i) => number(B.trials[i]), state: (i) => B.state[i], value: (i) => short(best[i]), node: (i) => B.node[i],
  })
  drawJoins()
  drawWay()
  const small = pitch() < 6 ? [] : seen
  knobs.data = {
    x: [...small.filter((i) => kids[i].length).map((i) => B.x[i]), ...ends.map((s) => s.i == ROOT ? 0 : B.x[s.i])],
    y: [...small.filter((i) => kids[i].length).map((i) => row[i]), ...ends.map((s) => s.y)],
    mark: [...small.filter((i) => kids[i].length).map((i) => isFolded(i) ? "square_cross" : "square"), ...ends.map(() => "square_cross")],
  }
  const broken = seen.filter((i) => failing.has(i))
  crosses.data = {
    x: broken.map((i) => Math.min(B.right[i], ...failing.get(i).map((failure) => failure.step))),
    y: broken.map((i) => row[i]),
  }
  const moving = seen.filter((i) => running.has(i))
  chains.data = {x: moving.map((i) => Math.min(B.right[i], running.get(i))), y: moving.map((i) => row[i])}
  ring()
  label()
}

// Draws connectors from branches up to their parents. Of those that leave the window at the same place, one is drawn.
function drawJoins() {
  const data = {x: [], top: [], bottom: [], rank: []}, passing = new Map()
  const add = (x, top, bottom, rank) => { data.x.push(x); data.top.push(top); data.bottom.push(bottom); data.rank.push(rank) }
  const join = (i, y, rank) => {
    const p = i.parent, above = row[p]
    if (above > to || y < from || above == y) return
    if (y <= to) add(i.x, Math.max(above, from), y, rank)
    else if (!(passing.get(p + "," + i.x)?.rank >= rank)) passing.set(p + "," + i.x, {x: i.x, above, rank})
  }
  for (const i of list) if (B.parent[i] != ROOT) join({parent: B.parent[i], x: B.x[i]}, row[i], rank.get(i))
  for (const s of stubs) if (s.i != ROOT) join({parent: s.i, x: B.x[s.i]}, s.y, NaN)
  for (const {x, above, rank} of passing.values()) add(x, Math.max(above, from), to, rank)
  joins.data = data
}

// Draws the best trial's path as one line: overlapping translucent lines would show.
function drawWay() {
  const path = [...way].reverse(), xs = [], ys = []
  path.forEach((i, k) => {
    const next = path[k + 1]
    xs.push(B.x[i], next === undefined ? B.right[i] : B.x[next])
    ys.push(row[i], row[i])
  })
  band.data = path.length ? {xs: [xs], ys: [ys]} : {xs: [], ys: []}
}

// Writes labels: the changes of a branch above its line, or before the text at its end if there is no room above.
function label() {
  steps = drawnSteps()
  if (pitch() < PITCH - 1.5) { labels.data = {x: [], y: [], text: []}; after.data = {x: [], y: [], text: []}; return }
  const scale = pixels(), {start, end: right} = fig.x_range, next = new Map()
  for (const i of seen) if (B.parent[i] != ROOT && row[B.parent[i]] == row[i]) next.set(B.parent[i], i)
  const own = {x: [], y: [], text: []}, last = {x: [], y: [], text: []}
  const add = (data, x, y, text) => { if (text) { data.x.push(x); data.y.push(y); data.text.push(text) } }
  for (const i of seen) {
    const x = Math.max(start, B.x[i]), stops = next.has(i) ? B.x[next.get(i)] : B.right[i]
    const room = (stops - x) * scale - 14, fits = pen.measureText(B.label[i]).width <= room
    if (fits || next.has(i)) add(own, x, row[i], fits ? B.label[i] : fitting(B.label[i], room))
    if (next.has(i)) continue
    const said = end(i), left = (right - Math.max(start, B.right[i])) * scale - 8
    const before = fits ? "" : fitting(B.label[i], left - pen.measureText(`  ·  ${said}`).width)
    add(last, B.right[i], row[i], fitting([before, said].filter(Boolean).join("  ·  "), left))
  }
  for (const s of ends) add(last, s.i == ROOT ? 0 : B.x[s.i], s.y, folded(s))
  labels.data = own
  after.data = last
}

function ring() {
  const at = [...hits.map((t) => T.leaf[t]), ...(selected == ROOT ? [] : [selected])].filter((i) => i != ROOT && row[i] >= from && row[i] <= to)
  found.data = {x: at.map((i) => B.right[i]), y: at.map((i) => row[i]), size: at.map((i) => i == selected ? 20 : 14)}
}
