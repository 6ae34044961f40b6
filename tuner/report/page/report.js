"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const { columns, knobs, rates, kinds, labels, rows } = page.trials;
  // plotly.js reads tags and, between dollar signs, formulas in its texts.
  const asText = (value) => String(value).replace(/[&<>$]/g, (c) => `&#${c.charCodeAt(0)};`);
  // A format is made once: `toLocaleString` makes one for each number, and there are thousands.
  const formats = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
  const number = (value, digits) => formats[digits].format(value);
  const rates3 = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
  const rate = (value) => rates3.format(value);
  const size = (gib) => gib.toFixed(gib < 1 ? 3 : 2);

  // Plots ---------------------------------------------------------------------------------
  function hover(index) {
    const row = rows[index];
    const [gib, samples, verdict, ...more] = row;
    const [tokens, step, outcome, source, trial, stage] = more.slice(knobs);
    const lines = more.slice(0, knobs).map((value, i) => `${asText(columns[3 + i])} <b>${asText(value)}</b>`);
    return [
      `<b>${verdict}</b> (${asText(source)})`,
      `${rate(samples)} samples/s, ${rate(tokens)} tokens/s`,
      `${size(gib)} GiB${stage ? ` in ${asText(stage)}` : ""}, ${rate(step)} s per step`,
      ...lines,
      `${asText(outcome)}, trial ${asText(trial)}`,
    ].join("<br>");
  }

  function theme(layout) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const update = {
      "font.color": color("--faint"),
      "font.family": getComputedStyle(document.body).fontFamily,
      "paper_bgcolor": "rgba(0,0,0,0)",
      "plot_bgcolor": "rgba(0,0,0,0)",
      "modebar.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": color("--faint"),
      "modebar.activecolor": color("--accent"),
      "hoverlabel.bgcolor": color("--card"),
      "hoverlabel.bordercolor": color("--line"),
      "hoverlabel.font.color": color("--ink"),
      "hoverlabel.align": "left",
    };
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis/.test(k))) {
      update[`${key}.gridcolor`] = color("--line");
      update[`${key}.linecolor`] = color("--line");
      update[`${key}.zeroline`] = false;
    }
    return update;
  }

  function assign(target, update) {
    for (const [path, value] of Object.entries(update)) {
      const names = path.split(".");
      const last = names.pop();
      let place = target;
      for (const name of names) place = place[name] = place[name] || {};
      place[last] = value;
    }
    return target;
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  function draw(element) {
    const figure = page.figures[element.id];
    for (const trace of figure.data) {
      if (trace.customdata) trace.text = trace.customdata.map(hover);
    }
    const layout = assign(figure.layout, theme(figure.layout));
    drawn.push(element);
    return Plotly.newPlot(element, figure.data, layout, {
      responsive: true, displaylogo: false, displayModeBar: element.id === "front" ? "hover" : false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]],
    });
  }
  dark.addEventListener("change", () => {
    for (const element of drawn) Plotly.relayout(element, theme(element.layout));
  });
  draw(document.getElementById("front"));
  // The small plots wait until they are about to be seen: the page is usable at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  document.querySelectorAll(".plot.small").forEach((element) => watcher.observe(element));
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll(".plot.small:not(.js-plotly-plot)").forEach(draw);
  });

  // Table ---------------------------------------------------------------------------------
  const perPage = 50;
  let texts = null; // of each row, made when something is looked for
  const textOf = (i) => {
    texts ??= rows.map((row) => row.join(" ").toLowerCase());
    return texts[i];
  };
  const speedColumn = columns.indexOf("samples/s");
  const ranks = Object.keys(labels); // from the recommended trial down to failed ones
  // Until a header is pressed, the best kinds come first and the fastest first among them.
  const state = { column: null, rising: false, page: 0 };
  const table = document.getElementById("trials");
  const kind = document.getElementById("kind");
  const filter = document.getElementById("filter");
  const element = (name, text, parent) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  for (const key of Object.keys(labels).filter((k) => kinds.includes(k))) {
    element("option", labels[key], kind).value = key;
  }
  const head = element("tr", undefined, table.tHead);
  const headers = columns.map((name, index) => {
    const cell = element("th", undefined, head);
    cell.scope = "col";
    const button = element("button", name, cell);
    button.type = "button";
    button.addEventListener("click", () => {
      state.rising = state.column === index ? !state.rising : !rates.includes(index);
      state.column = index;
      state.page = 0;
      show();
    });
    return cell;
  });

  function compare(a, b) {
    const column = state.column ?? speedColumn;
    const rank = state.column === null ? ranks.indexOf(kinds[a]) - ranks.indexOf(kinds[b]) : 0;
    if (rank !== 0) return rank;
    const [x, y] = [rows[a][column], rows[b][column]];
    if (x === y) return a - b;
    if (x === null || y === null) return x === null ? 1 : -1; // unknown comes last, both ways
    const order = typeof x === "number" && typeof y === "number"
      ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return state.rising ? order : -order;
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...rows.keys()]
      .filter((i) => !kind.value || kinds[i] === kind.value || (kind.value === "front" && kinds[i] === "best"))
      .filter((i) => words.every((word) => textOf(i).includes(word)))
      .sort(compare);
    const pages = Math.max(1, Math.ceil(found.length / perPage));
    state.page = Math.min(state.page, pages - 1);
    const body = document.createElement("tbody");
    for (const index of found.slice(state.page * perPage, (state.page + 1) * perPage)) {
      const line = element("tr", undefined, body);
      line.className = kinds[index];
      rows[index].forEach((value, column) => {
        const shown = column === 0 ? size : rates.includes(column) ? rate : String;
        const text = value === null ? "" : shown(value);
        element("td", text, line).title = text.length > 40 ? text : "";
      });
    }
    table.replaceChild(body, table.tBodies[0]);
    headers.forEach((cell, index) => {
      if (index === state.column) cell.setAttribute("aria-sort", state.rising ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    document.getElementById("count").textContent = `${number(found.length, 0)} of ${number(rows.length, 0)}`;
    document.getElementById("pages").textContent = `page ${state.page + 1} of ${pages}`;
    document.getElementById("previous").disabled = state.page === 0;
    document.getElementById("next").disabled = state.page >= pages - 1;
  }
  const turn = (by) => () => { state.page += by; show(); };
  document.getElementById("previous").addEventListener("click", turn(-1));
  document.getElementById("next").addEventListener("click", turn(1));
  for (const control of [kind, filter]) {
    control.addEventListener("input", () => { state.page = 0; show(); });
  }
  show();
})();
