// The tree in a frame, which cannot reach the notebook, and a line of text below it. Branches that the user requests in
// the drawer are sent to the kernel.
export default {
  render({model, el}) {
    const frame = document.createElement("iframe"), line = document.createElement("pre")
    frame.name = "hpstage-notebook" // the drawer then offers to train branches
    frame.title = "Stage tree"
    frame.sandbox = "allow-scripts"
    frame.style = "width: 100%; border: 0"
    line.className = "hpstage-state"
    line.style = "white-space: pre-wrap; margin: 0 1em"
    const draw = () => {
      frame.style.height = `${model.get("height")}px`
      frame.srcdoc = model.get("page")
    }
    const write = () => { line.textContent = model.get("state") }
    const receive = (event) => {
      const {hpstage, trial, at, values} = event.data ?? {}
      if (event.source === frame.contentWindow && hpstage === "branch")
        model.send({trial: String(trial), at: String(at), values: String(values)})
    }
    draw()
    write()
    model.on("change:page", draw)
    model.on("change:state", write)
    window.addEventListener("message", receive)
    el.append(frame, line)
    return () => {
      window.removeEventListener("message", receive)
      model.off("change:page", draw)
      model.off("change:state", write)
    }
  },
}
