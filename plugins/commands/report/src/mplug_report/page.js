"use strict";
// Draws the pictures of a report with Plotly, and again when a control changes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const element = (id) => document.getElementById(id);
  const longest = Math.max(0, ...data.runs.map((run) => run.axes.seconds.at(-1) ?? 0));
  const time = longest >= 7200 ? ["hours", 3600] : longest >= 120 ? ["minutes", 60] : ["seconds", 1];
  const axes = {
    step: { label: "step", scale: 1 },
    tokens: { label: "tokens", scale: 1 },
    seconds: { label: `training time, ${time[0]}`, scale: time[1] },
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The exponential moving average, divided by the sum of its weights: else it would begin near 0.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  function made(kind, properties, ...children) {
    const node = Object.assign(document.createElement(kind), properties);
    node.append(...children);
    return node;
  }

  function panel(parent, id, title, note) {
    const plot = made("div", { className: "plot", id });
    const parts = [made("h3", { textContent: title }), ...(note ? [made("p", { className: "note", textContent: note })] : [])];
    parent.append(made("section", { className: "panel" }, ...parts, plot));
    return plot;
  }

  function curves(one, axis, weight) {
    return data.runs.flatMap((run) => {
      const column = run.values[one.name];
      if (!column || hidden.has(run.name)) return [];
      const x = run.axes[axis].map((value) => value / axes[axis].scale);
      const y = column.map((value) => (value === null ? null : value * (one.scale ?? 1)));
      const line = { color: run.colour, dash: run.dash, width: 1.8 };
      const few = y.filter((value) => value !== null).length <= 2;
      const trace = {
        x, y, line, name: run.name, type: "scatter", connectgaps: true, mode: one.points || few ? "lines+markers" : "lines",
        marker: { size: 5 }, hovertemplate: "%{y:.5g}",
      };
      if (!one.smooth || weight === 0) return [trace];
      const faint = { ...trace, opacity: 0.28, line: { ...line, width: 1 }, hoverinfo: "skip", hovertemplate: null };
      return [faint, { ...trace, y: smoothed(y, weight) }];
    });
  }

  function layout(xTitle, yTitle) {
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
    return {
      font: { color: css("--ink"), size: 12 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 8, t: 22, b: 8 }, showlegend: false, hovermode: "x unified",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
      xaxis: { ...axis, title: { text: xTitle, standoff: 6 }, exponentformat: "SI" },
      yaxis: { ...axis, title: { text: yTitle, standoff: 6 }, exponentformat: "power" },
    };
  }

  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };

  function draw() {
    const axis = element("axis").value, weight = Number(element("smoothing").value);
    element("amount").textContent = weight.toFixed(2);
    for (const one of data.panels) {
      const drawn = layout(axes[axis].label, one.unit);
      if (one.log && element("log").checked) drawn.yaxis.type = "log";
      else if (one.zero) drawn.yaxis.rangemode = "tozero";
      if (one.large) drawn.yaxis.exponentformat = "SI";
      Plotly.react(`panel-${one.name}`, curves(one, axis, weight), drawn, config);
    }
    for (const run of data.runs.filter((one) => one.loads.values.length)) {
      const drawn = { ...layout("expert", ""), hovermode: "closest" };
      Object.assign(drawn.xaxis, { dtick: Math.ceil(run.loads.values[0].length / 16), showgrid: false });
      Object.assign(drawn.yaxis, { autorange: "reversed", showgrid: false, type: "category" });
      const bar = { title: { text: "× mean", side: "right" }, thickness: 12, outlinewidth: 0 };
      const z = run.loads.values;
      Plotly.react(`loads-${run.name}`, [{
        z, y: run.loads.routers, type: "heatmap", colorscale: "Viridis", zmin: 0, zmax: Math.max(2, ...z.flat()),
        colorbar: bar, hovertemplate: "expert %{x} of %{y}: %{z:.3f} × the mean<extra></extra>",
      }], drawn, config);
    }
  }

  for (const [name, axis] of Object.entries(axes)) element("axis").append(made("option", { value: name, textContent: axis.label }));
  for (const run of data.runs) {
    const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" }[run.dash];
    const button = made("button", { type: "button", title: "show or hide this run" });
    const swatch = `<svg viewBox="0 0 26 8"><path d="M0 4h26" stroke="${run.colour}" stroke-width="3" stroke-dasharray="${dashes}"/></svg>`;
    button.innerHTML = swatch;
    button.append(run.name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hidden.delete(run.name)) hidden.add(run.name);
      button.setAttribute("aria-pressed", String(!hidden.has(run.name)));
      draw();
    });
    element("legend").append(button);
  }
  for (const one of data.panels) panel(element("panels"), `panel-${one.name}`, one.title, one.note);
  const routed = data.runs.filter((run) => run.loads.values.length);
  for (const run of routed) panel(element("loads"), `loads-${run.name}`, run.name);
  if (!routed.length) element("loads").parentElement.remove();
  for (const id of ["axis", "smoothing", "log"]) element(id).addEventListener("input", draw);
  dark.addEventListener("change", draw);
  draw();
  document.documentElement.dataset.drawn = "yes";
})();
