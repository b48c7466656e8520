// Reactions to the user and to received rows: the window of visible rows, taps, keys, colours.
let selected = ROOT, running = new Map(), looked = {}, moved = false, awaited = 0

const view = () => Bokeh.index.find_one?.(fig)
const fits = () => Math.max(8, Math.floor(tall() / PITCH) - 1)

// Moves the window to the row `top`, with as many rows as are legible.
function frame(top = -1) {
  const span = Math.max(rows + 1, 3), each = Math.min(WIDEST, Math.max(PITCH, tall() / span))
  const seen = tall() / each, first = Math.max(-1, Math.min(top, rows - seen))
  looked.y = {start: first + seen, end: first}
  fig.y_range.setv({...looked.y, reset_start: seen - 1, reset_end: -1})
}

// Shows all steps, with room for the texts after them. Trials of several studies have longer names.
function frameSteps() {
  const room = Math.min(header.study ? 260 : 400, 0.45 * wide()), end = header.end * wide() / (wide() - room)
  looked.x = {start: -0.012 * end, end}
  fig.below[0].bounds = [0, header.end]
  fig.x_range.setv({...looked.x, reset_start: looked.x.start, reset_end: end})
}

const untouched = (axis) => looked[axis] === undefined || (fig[`${axis}_range`].start == looked[axis].start && fig[`${axis}_range`].end == looked[axis].end)

// Folds and redraws. If the user has moved the window, it stays there.
function refold() {
  const top = fig.y_range.end, follows = untouched("y")
  fold(fits())
  if (follows) frame(top)
  else clamp()
  draw()
  scale()
  slide()
  cancelAnimationFrame(awaited)
}

// Updates the colour bar: colours rank the best metric on a branch or below it.
function scale() {
  legend.title = `${cut(header.metric, 40)}, best at or below, by rank`
  legend.ticker.ticks = [...valued.keys()]
}

function refresh() {
  const follows = untouched("x")
  derive()
  if (follows) frameSteps()
  refold()
}

function clamp() {
  const {start, end} = fig.y_range, span = start - end, first = Math.max(-1, Math.min(end, rows - span))
  if (Math.abs(first - end) > 1e-6) fig.y_range.setv({start: first + span, end: first})
}

function scroll(by) {
  const {start, end} = fig.y_range, span = start - end, first = Math.max(-1, Math.min(end + by, rows - span))
  if (Math.abs(first - end) < 1e-6) return false
  looked.y = untouched("y") ? {start: first + span, end: first} : looked.y
  fig.y_range.setv({start: first + span, end: first})
  return true
}

// Brings a branch into the window.
function bring(i) {
  const {start, end} = fig.y_range, span = start - end
  if (row[i] < end + 1 || row[i] > start - 1) scroll(row[i] - span / 2 - end)
}

function select(i, t, step) {
  selected = i
  if (row[i] < 0) refold()
  bring(i)
  open(i, t, step)
  ring()
}

// A click on a square, or on the text of folded branches, folds or unfolds. Elsewhere on a branch, it opens the drawer.
function tap(x, y) {
  const width = 1 / pixels(), reach = matchMedia("(pointer: coarse)").matches ? 18 : 9
  const stub = stubs.find((s) => Math.abs(s.y - y) < 0.5)
  if (stub) { unfold(stub.i); return refold() }
  const near = list.filter((i) => Math.abs(row[i] - y) < 0.75)
  const knob = near.find((i) => kids[i].length && Math.abs(B.x[i] - x) < reach * width)
  if (knob !== undefined) { toggle(knob); return refold() }
  const gap = (i) => Math.max(B.x[i] - x, x - B.right[i], 0) / width + 30 * Math.abs(row[i] - y)
  const at = near.sort((a, b) => gap(a) - gap(b))[0]
  if (at === undefined) return shut()
  if (isFolded(at) && x > B.right[at]) { unfold(at); return refold() }
  select(at, undefined, Math.round(x))
}

// --- keys and wheel -------------------------------------------------------------------------------------------------

const typing = (event) => ["INPUT", "SELECT", "TEXTAREA"].includes(event.composedPath()[0]?.tagName)

document.addEventListener("keydown", (event) => {
  if (event.key == "Escape" && !drawer.hidden) return shut()
  if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return
  const inside = event.composedPath().some((node) => node === view()?.el || node === drawer)
  if (!inside) return
  const k = list.indexOf(selected)
  const keys = {
    ArrowDown: () => select(list[Math.min(list.length - 1, k + 1)]), ArrowUp: () => select(list[Math.max(0, k - 1)]),
    ArrowLeft: () => { if (k >= 0 && !isFolded(selected) && kids[selected].length) { toggle(selected); refold() } },
    ArrowRight: () => { if (k >= 0) { unfold(selected); refold() } },
    PageDown: () => scroll(0.9 * tall() / pitch()), PageUp: () => scroll(-0.9 * tall() / pitch()),
    Home: () => scroll(-rows), End: () => scroll(rows),
  }
  if (!(event.key in keys) || !list.length) return
  event.preventDefault()
  keys[event.key]()
})

// A scroll bar for the rows.
const bar = document.createElement("div")
bar.style.cssText = "position: absolute; right: 0; width: 10px; border-radius: 5px; background: #8888; cursor: grab; touch-action: none; z-index: 5"
bar.addEventListener("pointerdown", (event) => { bar.setPointerCapture(event.pointerId); event.preventDefault() })
bar.addEventListener("pointermove", (event) => { if (bar.hasPointerCapture(event.pointerId)) scroll(event.movementY * (rows + 1) / tall()) })

function slide() {
  const {start, end} = fig.y_range, all = rows + 1, part = (start - end) / all
  bar.hidden = part >= 0.999
  const above = 0.5 * ((fig.outer_height || options.height) - tall())
  bar.style.height = `${Math.max(24, part * tall())}px`
  bar.style.top = `${above + (tall() - Math.max(24, part * tall())) * Math.min(1, Math.max(0, (end + 1) / Math.max(1e-6, all - (start - end))))}px`
}

// Whenever data or window change, Bokeh computes each glyph six times: normal, selected, muted, ... Only the normal glyph
// is drawn here, so the others are disabled.
function lighten() {
  for (const renderer of fig.renderers) {
    const drawn = Bokeh.index.find_one(renderer)
    if (!drawn?._update_masked_indices) continue
    drawn._update_masked_indices = () => drawn.glyph.mask_data()
    for (const other of [drawn.decimated_glyph, drawn.selection_glyph, drawn.nonselection_glyph, drawn.muted_glyph])
      for (const name of ["set_data", "set_visuals", "after_visuals", "map_data"]) if (other?.[name]) other[name] = () => {}
  }
}

function attach() {
  const el = view()?.el
  if (!el) return setTimeout(attach, 50)
  lighten()
  ;(el.shadowRoot ?? el).append(bar)
  el.tabIndex = 0
  el.setAttribute("aria-label", "Stage tree: arrow keys select and fold; Enter in the search box opens the next trial found")
  el.addEventListener("wheel", (event) => {
    if (fig.toolbar.gestures?.scroll?.active || event.shiftKey) return
    if (event.ctrlKey || event.metaKey) {
      const {start, end} = fig.x_range, share = (event.clientX - el.getBoundingClientRect().left) / el.clientWidth
      const factor = Math.exp(0.002 * event.deltaY), middle = start + share * (end - start)
      fig.x_range.setv({start: middle - (middle - start) * factor, end: middle + (end - middle) * factor})
      event.preventDefault()
    } else if (scroll(event.deltaY * (event.deltaMode ? 20 : 1) / pitch())) event.preventDefault()
  }, {passive: false, capture: true})
}

// --- colours, and received rows -------------------------------------------------------------------------------------

const scheme = matchMedia("(prefers-color-scheme: dark)")

function paint() {
  const ink = scheme.matches ? "#dddddd" : "#222222"
  for (const axis of fig.below.concat(fig.left).filter((one) => one != legend)) axis.setv({axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: "#888888"})
  legend.setv({title_text_color: ink, major_label_text_color: ink})
  for (const renderer of fig.renderers) {
    if (["texts", "ends"].includes(renderer.name)) renderer.glyph.text_color = {value: ink}
    if (renderer.name == "chains") renderer.glyph.setv({fill_color: {value: ink}})
    if (renderer.name == "band") renderer.glyph.line_alpha = {value: scheme.matches ? 0.6 : 0.35}
    if (renderer.name == "knobs") renderer.glyph.setv({fill_color: {value: scheme.matches ? "#1d1f21" : "#ffffff"}})
    if (renderer.name == "tracks") renderer.glyph.line_color = {value: scheme.matches ? "#55595e" : "#cfcfcf"}
  }
}

function look() {
  cancelAnimationFrame(awaited)
  awaited = requestAnimationFrame(() => { clamp(); redraw(); slide() })
}

function take() {
  receive(message.data.text[0])
  running = new Map(header.at.map(([i, step]) => [i, step]))
  refresh()
  renew()
  taken.data = {count: [taken.data.count[0] + 1]} // then a server may send the next message
}

scheme.addEventListener("change", paint)
paint()
for (const range of [fig.x_range, fig.y_range])
  for (const property of [range.properties.start, range.properties.end]) property.change.connect(look)
for (const property of [fig.properties.inner_width, fig.properties.inner_height])
  property?.change.connect(() => { if (untouched("x")) frameSteps(); refold() })
message.properties.data.change.connect(take)
fig.hpstage = {valued: (tick) => short(valued.get(tick)), legend: () => [legend.title, [...valued.values()]], tap, find, type, next, select, toggle: (i) => { toggle(i); refold() }, unfold: (i) => { unfold(i); refold() }, scroll,
  shown: () => [...list], running: () => [...running.keys()], order: () => [...order], rows: () => Object.fromEntries(list.map((i) => [B.node[i], row[i]])),
  about: (i) => ({parent: B.parent[i], failures: (failing.get(i) ?? []).length, state: B.state[i], front: B.front[i], folded: isFolded(i)}),
  place: (i) => ({x: B.x[i], right: B.right[i], y: row[i]}), size: () => ({branches: n, trials: T.name.length, rows})}
attach()
take()
