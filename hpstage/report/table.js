// Sorts the table of trials by the clicked column, and filters its rows: those that contain all words are shown.
for (const table of document.querySelectorAll("table.sortable")) {
  const [head, body] = [table.tHead.rows[0], table.tBodies[0]]
  const value = (row, column) => {
    const text = row.cells[column].dataset.value ?? row.cells[column].textContent
    return text.trim() == "" ? null : Number.isNaN(Number(text)) ? text : Number(text)
  }
  const sort = (column) => {
    const title = head.cells[column], falling = title.ariaSort == "ascending"
    for (const cell of head.cells) cell.ariaSort = null
    title.ariaSort = falling ? "descending" : "ascending"
    const rows = [...body.rows].map((row) => [value(row, column), row])
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null) // missing values come last
      const order = typeof a == typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a == "number" ? -1 : 1
      return falling ? -order : order
    })
    body.append(...rows.map(([, row]) => row))
  }
  for (const button of head.querySelectorAll("button")) button.onclick = () => sort(button.parentElement.cellIndex)
  const filter = table.closest("details").querySelector("input"), count = table.closest("details").querySelector("output")
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/)
    let shown = 0
    for (const row of body.rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word))
      shown += !row.hidden
    }
    count.textContent = filter.value.trim() ? `${shown} of ${body.rows.length}` : ""
  }
}
