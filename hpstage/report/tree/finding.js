// The search: by number, by parameter, by state, or by any text.
let hits = [], hit = -1

function matches(text) {
  const query = text.trim().toLowerCase()
  if (!query) return () => false
  const trial = query.match(/^(?:trial\s+)?#?(\d+)$/)
  if (trial) return (t) => T.name[t] == trial[1]
  const [name, value] = query.split(/\s*=\s*/)
  if (value !== undefined)
    return (t) => Object.entries(T.params[t]).some(([key, own]) => {
      const text = own.toLowerCase()
      return key.toLowerCase() == name && (text == value || (value && Number(text) == Number(value)))
    })
  if (["failed", "complete", "pruned", "rejected", "running"].includes(query)) return (t) => T.state[t] == query
  const has = (text) => text.toLowerCase().includes(query)
  return (t) => Object.entries(T.params[t]).some(([key, own]) => has(key) || has(own)) || (T.leaf[t] != ROOT && has(B.label[T.leaf[t]]))
}

// Above the box; as a property of the model it would lay out the whole page again.
function say(text) {
  const title = Bokeh.index.find_one?.(search)?.el?.shadowRoot?.querySelector("label")
  if (title) title.textContent = text
  else search.title = text
}

// What is typed is looked for when nothing more follows for a moment.
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
  const test = matches(text)
  hits = [...T.leaf.keys()].filter((t) => T.leaf[t] != ROOT && test(t))
  hit = -1
  revealed = hits.slice(0, STEP).map((t) => T.leaf[t])
  say(text.trim() ? `${plural(hits.length, "trial")} found; Enter opens the next` : "Find trials")
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
