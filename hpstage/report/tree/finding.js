// The search. A trial must match all terms: "lr=0.05 late_batch=64 accuracy>0.9", "best", "failed", "trial 12".
let hits = [], hit = -1
const STATES = ["failed", "complete", "pruned", "rejected", "running"]
const COMPARE = {
  "=": (a, b) => a == b, "!=": (a, b) => a != b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
}

// Returns a function that tests a trial. Throws a message about the first term that is not understood.
function matches(text) {
  const typed = text.trim().toLowerCase().replace(/\btrial\s+#?(?=\S*\d(\s|$))/g, "#").replace(/\s*([<>!]=|[=<>])\s*/g, "$1")
  const tests = typed.split(/\s+/).filter((term) => term).map(term)
  return (t) => tests.length > 0 && tests.every((test) => test(t))
}

function term(text) {
  const trial = text.match(/^#?(\d+)$/) ?? text.match(/^#(\S+)$/) // a number, in all studies, or STUDY/NUMBER
  if (trial) return (t) => [T.name[t].toLowerCase(), T.name[t].split("/").at(-1)].includes(trial[1])
  if (text == "best") return (t) => t == header.best
  if (STATES.includes(text)) return (t) => T.state[t] == text
  const [, name, sign, value] = text.match(/^([^<>=!]+)([<>!]=|[=<>])(.*)$/) ?? []
  if (name) return comparison(text, name, sign, value)
  const has = (own) => own.toLowerCase().includes(text)
  return (t) => Object.entries(T.params[t]).some(([key, own]) => has(key) || has(own)) || (T.leaf[t] != ROOT && has(B.label[T.leaf[t]]))
}

// Numbers are compared as numbers. Other values can only be compared by = and !=, as text.
function comparison(text, name, sign, value) {
  const figures = {steps: T.requested, seconds: T.seconds, [header.metric.toLowerCase()]: T.value}
  const named = (t) => Object.entries(T.params[t]).find(([key]) => key.toLowerCase() == name)?.[1]
  if (!(name in figures) && [...T.params.keys()].every((t) => named(t) === undefined)) throw `no hyperparameter or metric ${name}`
  const number = value && Number(value)
  if (value == "" || (sign != "=" && sign != "!=" && Number.isNaN(number))) throw `a value is missing in ${text}`
  return (t) => {
    const own = named(t) ?? figures[name]?.[t]
    if (own == null) return false
    const mine = Number(own)
    if (!Number.isNaN(number) && !Number.isNaN(mine)) return COMPARE[sign](mine, number)
    return (sign == "=" || sign == "!=") && COMPARE[sign](String(own).toLowerCase(), value)
  }
}

// Shows a text above the search box. Setting the model's title instead would lay out the whole page again.
function say(text) {
  const title = Bokeh.index.find_one?.(search)?.el?.shadowRoot?.querySelector("label")
  if (title) title.textContent = text
  else search.title = text
}

// Searches for the typed text after a pause in typing.
let pause = 0, typed = null
function type(text) {
  clearTimeout(pause)
  typed = text
  pause = setTimeout(settle, 100)
}

function settle() {
  clearTimeout(pause)
  if (typed !== null) find(typed)
  typed = null
}

function find(text) {
  let test = () => false, wrong = ""
  try { test = matches(text) } catch (reason) { wrong = String(reason) }
  hits = [...T.leaf.keys()].filter((t) => T.leaf[t] != ROOT && test(t))
  hit = -1
  revealed = hits.slice(0, STEP).map((t) => T.leaf[t])
  const found = `${plural(hits.length, "trial")} found${hits.length ? "; Enter opens the next" : ""}`
  say(wrong ? `Not understood: ${wrong}` : text.trim() ? found : "Find trials")
  if (text.trim() && !hits.length) shut()
  refold()
  if (hits.length) bring(T.leaf[hits[0]])
}

function next() {
  settle()
  if (!hits.length) return
  hit = (hit + 1) % hits.length
  const leaf = T.leaf[hits[hit]]
  if (!revealed.includes(leaf)) revealed.push(leaf)
  for (let i = leaf; i != ROOT; i = B.parent[i]) closed.delete(i)
  select(leaf, hits[hit])
}
