/* The search of the site runs in a worker. A browser refuses workers to a page that is opened from the disk, so the
   worker's script then runs in a hidden frame. The name of this file tells the plugin `offline` that it need not load
   such a script from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = (...urls) => Promise.all(urls.map(one => this.load(one)))
      this.loaded = this.load(url)
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.inner.document.body.append(script)
      })
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
