// The received rows of branches (B), trials (T), failures (F) and logs (L); the order, ranks and folding of branches.
// Parents come before their children.
const ROOT = -1, STEP = 50
const B = {node: [], parent: [], x: [], right: [], front: [], trials: [], own: [], state: [], label: [], kept: [], values: [], points: []}
const T = {name: [], leaf: [], requested: [], state: [], value: [], params: [], seconds: []}
const F = new Map(), L = new Map(), texts = []
let header = {study: "", metric: "", maximize: false, end: 1, best: ROOT, store: "", at: []}

// Derived from the rows: branches in depth-first order; the descendants of i are order[at[i] + 1 .. stop[i] - 1].
let n = 0, order = [], at = [], stop = [], kids = [], roots = [], best = [], merits = [], ending = [], failing = new Map()
let way = new Set(), ranked = []

function receive(text) {
  if (!text) return
  const rows = JSON.parse(text)
  if (rows.reset) {
    for (const column of [...Object.values(B), ...Object.values(T), texts]) column.length = 0
    for (const set of [F, L, opened, closed]) set.clear()
    hits = revealed = []
    shut()
    picked = undefined
    looked = {}
  }
  fill(B, rows.branches)
  fill(T, rows.trials)
  for (const [i, text] of Object.entries(rows.texts)) texts[i] = text
  for (const [i, [branch, step, doing, summary, text]] of Object.entries(rows.failures)) F.set(+i, {branch, step, doing, summary, text})
  for (const i of rows.gone) F.delete(i)
  for (const [i, [curves, output]] of Object.entries(rows.logs)) L.set(+i, {curves, output})
  if (rows.header) header = rows.header
}

function fill(table, rows) {
  const columns = Object.values(table)
  for (const [i, row] of Object.entries(rows)) columns.forEach((column, k) => { column[i] = row[k] })
}

const better = (a, b) => header.maximize ? a > b : a < b
const by = (...keys) => (a, b) => { for (const key of keys) { const [x, y] = [key(a), key(b)]; if (x != y) return x - y } return 0 }
const merit = (i) => merits[i]
const children = (i) => i == ROOT ? roots : kids[i]

function derive() {
  n = B.node.length
  kids = Array.from({length: n}, () => [])
  ending = Array.from({length: n}, () => [])
  roots = []
  best = B.own.slice()
  for (let i = n - 1; i >= 0; i--) {
    const p = B.parent[i]
    if (p != ROOT && best[i] != null && (best[p] == null || better(best[i], best[p]))) best[p] = best[i]
  }
  for (let i = 0; i < n; i++) children(B.parent[i]).push(i)
  merits = best.map((value) => value == null ? -Infinity : header.maximize ? value : -value)
  // The last child to diverge is next to its parent: no connector crosses a line. As in hpstage/accounting/branches.py.
  for (const own of kids) if (own.length > 1) own.sort(by((i) => -B.x[i], (i) => B.trials[i], (i) => B.node[i]))
  order = []
  at = new Int32Array(n)
  stop = new Int32Array(n)
  const waiting = roots.toReversed()
  while (waiting.length) {
    const i = waiting.pop()
    at[i] = order.push(i) - 1
    for (let k = kids[i].length - 1; k >= 0; k--) waiting.push(kids[i][k])
  }
  for (let k = n - 1; k >= 0; k--) {
    const i = order[k], p = B.parent[i]
    stop[i] = Math.max(stop[i], k + 1)
    if (p != ROOT) stop[p] = Math.max(stop[p], stop[i])
  }
  for (let t = 0; t < T.leaf.length; t++) if (T.leaf[t] != ROOT) ending[T.leaf[t]].push(t)
  failing = new Map()
  for (const failure of F.values()) failing.set(failure.branch, [...(failing.get(failure.branch) ?? []), failure])
  way = new Set()
  for (let i = header.best == ROOT ? ROOT : T.leaf[header.best]; i != ROOT; i = B.parent[i]) way.add(i)
  ranked = [...order].sort(by((i) => -B.trials[i], (i) => -merit(i), (i) => B.node[i]))
}

// Ranks branches by the best metric on them or below, from 0 for the worst to 1 for the best. Only unfolded branches are
// ranked, so that the visible colours differ.
function colour() {
  const values = [...new Set(list.map(merit).filter((value) => value > -Infinity))].sort((a, b) => a - b)
  const place = new Map(values.map((value, k) => [value, values.length > 1 ? k / (values.length - 1) : 1]))
  rank = new Map(list.map((i) => [i, place.get(merit(i)) ?? NaN]))
  const ticks = new Set(Array.from({length: 3}, (_, k) => Math.round(k * (values.length - 1) / 2)))
  valued = new Map([...ticks].filter((k) => k in values).map((k) => [place.get(values[k]), header.maximize ? values[k] : -values[k]]))
}

// --- folding --------------------------------------------------------------------------------------------------------

let rank = new Map(), valued = new Map(), shown = new Uint8Array(0), row = new Int32Array(0), list = [], stubs = [], rows = 0
const opened = new Set(), closed = new Set() // by the user
let revealed = [] // by the search

// Returns the branches that fit into `most` rows: the most trials first, the best among equals. The best trial's path is
// always included.
function foremost(most) {
  const chosen = new Uint8Array(n), taken = new Uint8Array(n)
  let used = 0
  for (const i of [...[...way].reverse(), ...ranked]) {
    if (chosen[i]) continue
    const p = B.parent[i], on = p != ROOT && !taken[p] && B.x[i] == B.right[p]
    if (used + !on > most && !way.has(i)) break
    used += !on
    if (on) taken[p] = 1
    chosen[i] = 1
  }
  return chosen
}

// Returns the branches that are unfolded before any action of the user is applied. After the first action they stay the
// same, except that new branches below unfolded ones are added.
let base = new Uint8Array(0)
function unfoldedBefore(most) {
  if (!opened.size && !closed.size) return foremost(most)
  const chosen = new Uint8Array(n)
  chosen.set(base.subarray(0, n))
  for (let i = base.length, room = 2 * most - rows; i < n && room > 0; i++)
    if (B.parent[i] == ROOT || chosen[B.parent[i]]) { chosen[i] = 1; room-- }
  return chosen
}

function unfolded(most) {
  base = unfoldedBefore(most)
  const chosen = base.slice()
  const reveal = (i) => { for (; i != ROOT && !chosen[i]; i = B.parent[i]) chosen[i] = 1 }
  for (const i of opened) reveal(i)
  for (const i of closed) for (let k = at[i] + 1; k < stop[i]; k++) chosen[order[k]] = 0
  for (const i of revealed) reveal(i)
  return chosen
}

// Places the unfolded branches on rows. A child that begins where its parent ends continues on the parent's row, if it is
// drawn right after the parent. If only some children of a branch are unfolded, a stub on a row after them counts the others.
function place() {
  row = new Int32Array(n).fill(-1)
  list = []
  stubs = []
  rows = 0
  const open = []
  let last = ROOT
  const close = (i) => {
    const all = children(i), hidden = all.filter((child) => !shown[child])
    if (hidden.length && hidden.length < all.length) stubs.push({i, y: rows++, ...sum(hidden)})
  }
  for (let k = 0; k < n; ) {
    const i = order[k]
    while (open.length && stop[open.at(-1)] <= k) { close(open.pop()); last = ROOT }
    if (!shown[i]) { k = stop[i]; continue }
    const on = last != ROOT && B.parent[i] == last && B.x[i] == B.right[last]
    row[i] = on ? rows - 1 : rows++
    list.push(i)
    open.push(last = i)
    k++
  }
  while (open.length) close(open.pop())
  close(ROOT)
}

const sum = (hidden) => ({
  nodes: hidden.reduce((all, i) => all + stop[i] - at[i], 0),
  trials: hidden.reduce((all, i) => all + B.trials[i], 0),
})

function fold(most) {
  let few = most
  do {
    shown = unfolded(few)
    place()
  } while (rows > most && few > 8 && !opened.size && !closed.size && !revealed.length && (few -= Math.max(1, Math.min(few - 8, rows - most))))
  colour()
}

const isFolded = (i) => children(i).length > 0 && !children(i).some((child) => shown[child])

function unfold(i) {
  closed.delete(i)
  const hidden = children(i).filter((child) => !shown[child])
  hidden.sort(by((c) => -B.trials[c], (c) => -merit(c), (c) => B.node[c])).slice(0, STEP).forEach((child) => opened.add(child))
}

function toggle(i) {
  if (isFolded(i)) return unfold(i)
  for (let k = at[i] + 1; k < stop[i]; k++) opened.delete(order[k])
  revealed = revealed.filter((j) => at[j] <= at[i] || at[j] >= stop[i])
  closed.add(i)
}
