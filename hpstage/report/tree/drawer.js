// The drawer with the details of a branch and its trials. All text of users is inserted by textContent.
const LISTED = 20 // number of trials added at a time
const drawer = document.createElement("aside")
drawer.className = "hpstage-drawer"
drawer.setAttribute("aria-label", "Details")
drawer.tabIndex = -1
drawer.hidden = true
const sheet = document.createElement("style")
sheet.textContent = `.hpstage-drawer { position: fixed; z-index: 1000; top: 0; right: 0; bottom: 0; width: 400px; box-sizing: border-box;
  overflow: auto; padding: 12px 16px; font: 13px/1.45 system-ui, sans-serif; background: #ffffff; color: #222222;
  border-left: 1px solid #8886; overflow-wrap: anywhere }
.hpstage-drawer[hidden] { display: none } .hpstage-drawer:focus { outline: none } .hpstage-drawer h2 { font-size: 15px; margin: 0 32px 4px 0 }
.hpstage-drawer h3 { font-size: 13px; margin: 14px 0 2px } .hpstage-drawer p { margin: 2px 0 }
.hpstage-drawer pre, .hpstage-drawer code { font: 12px/1.4 ui-monospace, monospace; white-space: pre-wrap; user-select: all }
.hpstage-drawer pre { max-height: 22em; overflow: auto; border-left: 3px solid #d55e00; padding-left: 8px; margin: 4px 0 }
.hpstage-drawer section { content-visibility: auto; contain-intrinsic-height: auto 180px }
.hpstage-drawer dl { display: grid; grid-template-columns: minmax(5em, max-content) minmax(60%, 1fr); gap: 1px 12px; margin: 2px 0 }
.hpstage-drawer dt { opacity: .7 } .hpstage-drawer dd { margin: 0 }
.hpstage-drawer .copy { float: right; font: 11px system-ui, sans-serif; margin-left: 8px; cursor: pointer } .hpstage-drawer section > .copy { margin-top: 14px }
.hpstage-drawer .close { position: absolute; top: 6px; right: 8px; font: 20px/1 sans-serif; padding: 6px 10px; border: 0; background: none;
  color: inherit; cursor: pointer } .hpstage-drawer svg { display: block; width: 100%; height: 46px }
body.hpstage-drawn { padding-right: 410px }
@media (max-width: 800px) { .hpstage-drawer { top: 45%; left: 0; width: auto; border-left: 0; border-top: 1px solid #8886 }
  body.hpstage-drawn { padding-right: 0; padding-bottom: 55vh } }
@media (prefers-color-scheme: dark) { .hpstage-drawer { background: #1d1f21; color: #dddddd } }`
document.head.append(sheet)
document.body.append(drawer)

function shut() {
  drawer.hidden = true
  document.body.classList.remove("hpstage-drawn")
  selected = ROOT
  ring()
}

function element(kind, text, ...inside) {
  const made = document.createElement(kind)
  if (text != null) made.textContent = text
  made.append(...inside)
  return made
}

const pairs = (entries) => element("dl", null, ...entries.filter(([, value]) => value !== "").flatMap(
  ([name, value]) => [element("dt", name), element("dd", String(value))]))

// Returns the values of each hyperparameter of a trial by step, joined along its branches.
function schedules(t) {
  const path = pathTo(T.leaf[t]), found = new Map()
  path.forEach((i, k) => {
    const last = k + 1 < path.length ? B.x[path[k + 1]] : Math.min(B.right[i], T.requested[t])
    for (const [name, value] of Object.entries(B.values[i])) {
      const points = found.get(name) ?? found.set(name, []).get(name)
      const own = Array.isArray(value) ? value.filter(([step]) => step < last) : [[B.x[i], value]]
      if (points.length && own.length && B.x[i] > points.at(-1)[0] + 1) points.push([B.x[i] - 1, points.at(-1)[1]])
      points.push(...own)
    }
  })
  for (const points of found.values()) if (points.length && points.at(-1)[0] < T.requested[t] - 1) points.push([T.requested[t] - 1, points.at(-1)[1]])
  return found
}

function curve(points) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline")
  const ys = points.map((p) => p[1]), [low, high, last] = [Math.min(...ys), Math.max(...ys), Math.max(1, points.at(-1)[0])]
  svg.setAttribute("viewBox", "0 0 200 46")
  svg.setAttribute("preserveAspectRatio", "none")
  line.setAttribute("points", points.map(([x, y]) => `${200 * x / last},${43 - 40 * (y - low) / (high - low || 1)}`).join(" "))
  for (const [name, value] of [["fill", "none"], ["stroke", "#2a9d8f"], ["stroke-width", "1.5"], ["vector-effect", "non-scaling-stroke"]])
    line.setAttribute(name, value)
  svg.append(line)
  return svg
}

function card(t) {
  const metric = header.metric && short(T.value[t]) && `${cut(header.metric, 60)} ${short(T.value[t])}`
  const parts = [compareButton(t), element("h3", `Trial ${T.name[t]}: ${[T.state[t], metric].filter(Boolean).join(", ")}`)]
  parts.push(pairs([...Object.entries(T.params[t]), ["step", number(T.requested[t])], ["worker seconds", short(T.seconds[t])]]))
  for (const [name, points] of schedules(t)) {
    const ys = points.map((p) => p[1]), values = new Set(ys)
    if (values.size < 2) continue
    const numbers = ys.every((y) => typeof y == "number")
    parts.push(element("p", `${name}: ${numbers ? `${short(ys[0])} to ${short(ys.at(-1))} (${short(Math.min(...ys))} to ${short(Math.max(...ys))})` : [...values].join(", ")}`))
    if (numbers) parts.push(curve(points))
  }
  const own = element("section", null, ...parts)
  return t == other && picked !== undefined && picked != t ? element("div", null, element("section", null, ...compared(picked, t)), own) : own
}

function pathTo(i) {
  const path = []
  for (let above = i; above != ROOT; above = B.parent[above]) path.unshift(above)
  return path
}

const range = (name, points) => element("p", `${name}: ${short(points[0][1])} to ${short(points.at(-1)[1])}`)

// Returns the metric by step along a path.
const evaluated = (path) => path.flatMap((i, k) => B.points[i].filter(([step]) => k + 1 == path.length || step <= B.x[path[k + 1]]))

// Returns curves of the metric and of logged values along the path to the end of a branch, and the branch's output.
function logged(i) {
  const path = pathTo(i), curves = new Map()
  const values = evaluated(path), parts = values.length > 1 ? [range(cut(header.metric, 60), values), curve(values)] : []
  for (const branch of path)
    for (const [name, points] of Object.entries(L.get(branch)?.curves ?? {}))
      curves.set(name, [...(curves.get(name) ?? []).filter((p) => p[0] < B.x[branch]), ...points])
  if (curves.size) parts.push(element("h3", "Logged from step 0 to the end of this branch"))
  for (const [name, points] of curves) parts.push(range(name, points), curve(points))
  const output = L.get(i)?.output
  if (output) {
    parts.push(element("h3", "Printed on this branch"), element("pre", output))
    parts.at(-1).style.borderColor = "#888888"
  }
  return parts
}

// Returns the step at which two trials diverge, the hyperparameters that differ, and both metrics at later common steps.
let picked, other // the trial to compare with, and the trial compared with it
function compared(a, b) {
  const [first, second] = [a, b].map((t) => pathTo(T.leaf[t])), k = first.findIndex((i, k) => i != second[k])
  const after = [first, second].flatMap((path) => k >= 0 && path[k] !== undefined ? [B.x[path[k]]] : [])
  const step = Math.min(...after, T.requested[a], T.requested[b]), [one, other] = [schedules(a), schedules(b)]
  const text = (points) => points ? [...new Set([points[0][1], points.at(-1)[1]])].map((value) => typeof value == "number" ? short(value) : value).join(" to ") : "-"
  const differing = [...new Set([...one.keys(), ...other.keys()])].filter((name) => JSON.stringify(one.get(name)) != JSON.stringify(other.get(name)))
  const theirs = new Map(evaluated(second))
  const metrics = evaluated(first).filter(([at]) => at > step && theirs.has(at)).map(([at, value]) => [`${cut(header.metric, 40)}, step ${number(at)}`, `${short(value)}, ${short(theirs.get(at))}`])
  return [element("h3", `Trials ${T.name[a]} and ${T.name[b]} diverge at step ${number(step)}`),
    pairs([...differing.map((name) => [name, `${text(one.get(name))}; ${text(other.get(name))}`]), ...metrics])]
}

function compareButton(t) {
  const button = element("button", picked === undefined ? "Compare" : picked == t ? "Stop comparing" : `Compare with trial ${T.name[picked]}`)
  button.className = "copy"
  button.onclick = () => {
    if (picked !== undefined && picked != t) other = t
    else picked = picked == t ? undefined : t
    open(...inDrawer)
  }
  return button
}

// Returns the cards of the first trials, and a button for the others.
function cards(trials) {
  const made = element("div", null, ...trials.slice(0, LISTED).map(card)), rest = trials.slice(LISTED)
  if (rest.length) {
    const more = element("button", `${plural(rest.length, "more trial")}`)
    more.onclick = () => more.replaceWith(cards(rest))
    made.append(more)
  }
  return made
}

const quoted = (text) => /^[\w./:@%?=+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`

// In a notebook: fields for the step and the values of a branch, and a button that trains it. Web pages cannot start training.
function trained(t, step) {
  if (window.name != "hpstage-notebook") return []
  const [name, value] = scheduled(t, step), button = element("button", "Train")
  const [at, values] = [["Step of the branch", step], ["Values of the branch", `${name}=${value}`]].map(([label, text]) => {
    const field = element("input")
    field.value = text
    field.setAttribute("aria-label", label)
    return field
  })
  at.size = 6
  button.className = "copy"
  button.onclick = () => parent.postMessage({hpstage: "branch", trial: identity(t), at: at.value, values: values.value}, "*")
  return [element("p", null, button, at, values)]
}

const identity = (t) => header.study ? `${header.study}/${T.name[t]}` : T.name[t]

// Returns a hyperparameter and its value at a step: lr, else the first hyperparameter that varies, else the first.
function scheduled(t, step) {
  const values = [...schedules(t)].map(([name, points]) => [name, points.filter((p) => p[0] <= step).at(-1)?.[1], new Set(points.map((p) => p[1])).size])
  return values.find(([name]) => name == "lr") ?? values.find(([, , count]) => count > 1) ?? values[0] ?? ["lr", 0.01]
}

// Returns a command and a Python call that train a branch of a trial from a step, and a call that loads the state there.
function branching(t, step) {
  const [name, value] = scheduled(t, step), id = identity(t), trial = `hpstage.open(${JSON.stringify(header.store || "STORE")}).trial(${JSON.stringify(id)})`
  const python = typeof value == "boolean" ? (value ? "True" : "False") : JSON.stringify(value)
  const keyword = /^[A-Za-z_]\w*$/.test(name) ? `${name}=${python}` : `{${JSON.stringify(name)}: ${python}}`
  const assigned = quoted(`${name}=${typeof value == "string" ? JSON.stringify(value) : value}`)
  return [
    `hpstage branch ${quoted(header.store || "STORE")} --trial ${quoted(id)} --at ${step} --set ${assigned}`,
    `${trial}.branch(${step}, ${keyword}, trainable=TRAINABLE)`,
    `${trial}.load(TRAINABLE, ${step}, retrain=True)`,
  ]
}

// Returns a line of code with a button that copies it, by the clipboard API if the page may use it, else by a selection.
function copyable(text) {
  const code = element("code", text), button = element("button", "Copy")
  button.className = "copy"
  button.onclick = async () => {
    try { await navigator.clipboard.writeText(text) }
    catch {
      getSelection().selectAllChildren(code)
      document.execCommand("copy")
    }
    button.textContent = "Copied"
  }
  return element("p", null, button, code)
}

// Returns commands for the store, and, for a trial, those that export its weights or extend its study.
function commands(t) {
  const store = quoted(header.store || "STORE"), study = header.study ? ` --study ${quoted(header.study)}` : ""
  const found = [`hpstage status ${store}`, `hpstage report ${store}${study}`]
  if (t === undefined) return found
  const id = identity(t)
  found.push(`hpstage export ${store} weights --trial ${quoted(id)} trial-${T.name[t]}.safetensors`)
  if (header.study)
    found.push(`hpstage run SCRIPT.py:TRAINABLE SCRIPT.py:SPACE --store ${store} --study-name ${quoted(header.study)} --metric ${quoted(header.metric)} --steps ${2 * header.end} --n-trials ${T.name.length} --extend`)
  return found
}

let inDrawer = [ROOT], drawerText = ""

function open(i, only, step) {
  inDrawer = [i, only, step]
  const parts = contents(i, only, step)
  drawerText = parts.map((part) => part.textContent).join()
  if (drawer.scrollTop) drawer.scrollTop = 0
  drawer.replaceChildren(...parts)
  drawer.hidden = false
  document.body.classList.add("hpstage-drawn")
}

// Updates the drawer if what it shows has changed.
function renew() {
  if (drawer.hidden) return
  const parts = contents(...inDrawer), now = parts.map((part) => part.textContent).join()
  if (now == drawerText) return
  const top = drawer.scrollTop
  drawerText = now
  drawer.replaceChildren(...parts)
  drawer.scrollTop = top
}

function contents(i, only, step) {
  const close = element("button", "×")
  close.className = "close"
  close.setAttribute("aria-label", "Close")
  close.onclick = shut
  const parts = [close, element("h2", `Node ${B.node[i]}, ${B.state[i]}`), pairs([
    ["steps", `${number(B.x[i])} to ${number(B.right[i])}${B.front[i] < B.right[i] ? `, trained to ${number(B.front[i])}` : ""}`],
    [B.parent[i] == ROOT ? "trains with" : "changes", B.label[i]],
    ["trials", number(B.trials[i])], ["best at or below", short(best[i])], ["checkpoint", B.kept[i]],
  ])]
  // Failures on the branch and on its ancestors.
  for (let above = i; above != ROOT; above = B.parent[above])
    for (const failure of failing.get(above) ?? []) {
      parts.push(element("h3", `Failed while ${failure.doing}, step ${number(failure.step)}, node ${B.node[above]}`), element("p", failure.summary))
      if (texts[failure.text]) parts.push(element("pre", texts[failure.text]))
    }
  parts.push(...logged(i))
  let through = []
  for (let k = at[i]; k < stop[i]; k++) through.push(...ending[order[k]])
  through.sort((a, b) => a - b)
  if (only !== undefined) through = [only, ...through.filter((t) => t != only)]
  if (through.length && B.front[i] > B.x[i]) {
    // A trial has no steps left to branch at its end.
    const last = Math.min(B.front[i], T.requested[through[0]] - 1)
    const at = Math.max(B.x[i], Math.min(step ?? (B.x[i] || last >> 1), last))
    parts.push(element("h3", `Branch from here: step ${number(at)}`), ...trained(through[0], at), ...branching(through[0], at).map(copyable))
  }
  parts.push(cards(through))
  parts.push(element("h3", "In a terminal"))
  parts.push(...commands(through[0]).map(copyable))
  return parts
}
