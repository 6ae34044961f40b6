"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const { models, gpus, methods, texts, cells } = page;
  const find = (id) => document.getElementById(id);
  const element = (name, text, parent, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    if (parent) parent.append(made);
    return made;
  };
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const digits3 = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const usd = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const billions = (params) => (params ? `${digits3.format(params / 1e9)} B` : "");
  const thousands = (tokens) => (tokens < 1000 ? String(tokens) : `${digits3.format(tokens / 1024)}k`);

  const cellOf = (model, gpu, method) => {
    const [refused, remarks, settings, least, longest, fastest] =
      cells[(model * gpus.length + gpu) * methods.length + method];
    const run = (row) => row && {
      tokens: row[0], batch: row[1], recomputes: row[2], gib: row[3], rate: row[4], time: row[5], usd: row[6],
      traced: row[7],
    };
    return {
      refused: texts[refused], remarks: texts[remarks], settings: texts[settings], least,
      longest: run(longest), fastest: run(fastest),
    };
  };
  // What a cell shows: its number, the number as text, and whether little of it is good.
  const metrics = {
    longest: { label: "Longest example", of: (c) => c.longest?.tokens, text: thousands, unit: "tokens" },
    rate: { label: "Speed", of: (c) => c.fastest?.rate, text: (x) => digits3.format(x), unit: "samples/s" },
    usd: {
      label: "Cost of an epoch", of: (c) => c.fastest?.usd, text: (x) => (x < 100 ? usd : whole).format(x),
      unit: "USD", less: true,
    },
    gib: {
      label: "Memory", of: (c) => c.fastest?.gib, text: (x) => digits3.format(x), unit: "GiB of the fastest",
      less: true,
    },
  };

  // Controls ------------------------------------------------------------------------------
  const state = { method: 0, metric: "longest", rows: null, columns: null };
  function segments(id, entries, chosen, change) {
    for (const [value, text] of entries) {
      const label = element("label", text, find(id));
      const input = element("input", undefined, label);
      Object.assign(input, { type: "radio", name: id, value, checked: value === chosen });
      input.addEventListener("change", () => { change(value); show(); });
    }
  }
  segments("method", methods.map(([, title], index) => [index, title]), 0, (v) => { state.method = v; });
  segments("metric", Object.entries(metrics).map(([k, m]) => [k, m.label]), "longest", (v) => { state.metric = v; });
  const options = (id, entries) => entries.forEach(([text, value]) => { element("option", text, find(id)).value = value; });
  options("params", [["any size", ""], ...[2, 5, 9, 15, 35].map((b) => [`${b} B`, b])]);
  options("memory", [
    ["any", "0-"], ["up to 16 GB", "0-17"], ["24 GB", "17-30"], ["32 to 48 GB", "30-60"], ["80 GB and more", "60-"],
  ]);
  for (const id of ["filter", "params", "memory", "fitting"]) find(id).addEventListener("input", () => show());

  function chosen() {
    const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const most = Number(find("params").value) * 1e9 || Infinity;
    const [from, to] = find("memory").value.split("-").map((x, i) => (x === "" ? Infinity : Number(x)));
    const named = (parts) => words.filter((word) => parts.join(" ").toLowerCase().includes(word));
    let rows = [...models.keys()].filter((m) => (models[m][1] || 0) <= most);
    let columns = [...gpus.keys()].filter((g) => gpus[g][2] >= from && gpus[g][2] < to);
    // A word that names models chooses models, one that names GPU types chooses those.
    const ofModels = words.filter((w) => models.some(([id]) => id.toLowerCase().includes(w)));
    const ofGpus = words.filter((w) => gpus.some(([id, name]) => `${id} ${name}`.toLowerCase().includes(w)));
    if (ofModels.length) rows = rows.filter((m) => ofModels.some((w) => models[m][0].toLowerCase().includes(w)));
    if (ofGpus.length) columns = columns.filter((g) => ofGpus.some((w) => named(gpus[g].slice(0, 2)).includes(w)));
    if (words.some((w) => !ofModels.includes(w) && !ofGpus.includes(w))) rows = columns = [];
    if (find("fitting").checked) {
      const fits = (m, g) => cellOf(m, g, state.method).longest;
      rows = rows.filter((m) => columns.some((g) => fits(m, g)));
      columns = columns.filter((g) => rows.some((m) => fits(m, g)));
    }
    return [rows, columns];
  }

  // Table ---------------------------------------------------------------------------------
  const valueOf = (m, g) => metrics[state.metric].of(cellOf(m, g, state.method)) ?? null;
  function sorted(places, order, value) {
    if (!order) return places;
    return [...places].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1; // what does not fit comes last
      return order.rising ? x - y : y - x;
    });
  }
  function turn(axis, by) {
    const order = state[axis];
    const rising = Boolean(metrics[state.metric].less);
    if (order?.by !== by) state[axis] = { by, rising };
    else if (order.rising === rising) state[axis] = { by, rising: !rising };
    else state[axis] = null; // the third time: the order of the file
    show();
  }
  function header(row, axis, by, text, notes, title) {
    const cell = element("th", undefined, row);
    cell.scope = axis === "rows" ? "col" : "row";
    const button = element("button", text, cell);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", () => turn(axis, by));
    for (const note of notes) element("small", note, button);
    if (state[axis]?.by === by) cell.setAttribute("aria-sort", state[axis].rising ? "ascending" : "descending");
  }

  function reason(c, gpu) {
    if (c.refused) return c.refused;
    if (!c.longest) return `does not fit: it needs ${c.least} of ${gpus[gpu][2]} GiB even at a micro-batch of 1 with the shortest examples`;
    if (!c.fastest) return `examples of ${whole.format(page.length)} tokens do not fit; the longest have ${whole.format(c.longest.tokens)}`;
    return "";
  }

  function show() {
    const metric = metrics[state.metric];
    let [rows, columns] = chosen();
    rows = sorted(rows, state.rows, (m) => valueOf(m, state.rows.by));
    columns = sorted(columns, state.columns, (g) => valueOf(state.columns.by, g));
    const values = rows.flatMap((m) => columns.map((g) => valueOf(m, g))).filter((x) => x !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const heat = (x) => {
      const share = high > low ? Math.log(x / low) / Math.log(high / low) : 1;
      return 10 + 90 * (metric.less ? 1 - share : share);
    };
    const table = find("grid");
    const top = element("tr");
    element("th", undefined, top).append(element("small", "click a name to sort"));
    for (const g of columns) {
      const [id, name, gib, price] = gpus[g];
      header(top, "rows", g, name, [`${whole.format(gib)} GiB`, price === null ? "no price" : `$${usd.format(price)}/h`], `${id}: sort the models`);
    }
    table.tHead.replaceChildren(top);
    table.style.minWidth = `${110 + 66 * columns.length}px`;
    const body = element("tbody");
    for (const m of rows) {
      const row = element("tr", undefined, body);
      header(row, "columns", m, models[m][0], [billions(models[m][1])], "sort the GPU types");
      for (const g of columns) {
        const c = cellOf(m, g, state.method);
        const value = valueOf(m, g);
        const button = element("button", value === null ? "-" : metric.text(value), element("td", undefined, row));
        button.type = "button";
        if (c.remarks && value !== null) element("sup", "*", button);
        if (value === null) {
          // It fits, and the price is not known: that is no reason to grey it.
          const unpriced = state.metric === "usd" && c.fastest;
          button.className = c.refused ? "refused" : "small";
          if (unpriced) button.firstChild.data = "?";
          button.title = `${models[m][0]} on ${gpus[g][1]}: ${unpriced ? "no price is known" : reason(c, g)}`;
        } else {
          button.style.setProperty("--heat", heat(value));
          button.classList.toggle("hot", heat(value) > 55);
          button.title = `${models[m][0]} on ${gpus[g][1]}: ${metric.text(value)} ${metric.unit} (predicted)`;
        }
        button.dataset.cell = `${models[m][0]}/${gpus[g][0]}`;
        button.addEventListener("click", () => open(m, g));
      }
    }
    table.replaceChild(body, table.tBodies[0]);
    find("starred").hidden = !body.querySelector("sup");
    find("count").textContent = `${rows.length} of ${models.length} models, ${columns.length} of ${gpus.length} GPU types`;
    const ends = values.length ? [low, high] : [null, null];
    if (metric.less) ends.reverse();
    [find("low").textContent, find("high").textContent] =
      ends.map((x, i) => (x === null ? "" : `${metric.text(x)}${i ? ` ${metric.unit}` : ""}`));
  }

  // One cell ------------------------------------------------------------------------------
  function open(m, g) {
    const [gpu, name, gib, price] = gpus[g];
    find("cell-title").textContent = `${models[m][0]} on ${name}`;
    const text = find("cell-text");
    text.replaceChildren();
    element("p", `${gib} GiB${price === null ? ", no price is known" : `, ${usd.format(price)} USD an hour`}. All numbers are predicted.`, text, "note");
    methods.forEach(([, title], k) => {
      const c = cellOf(m, g, k);
      const article = element("article", undefined, text);
      element("h3", title, article);
      const why = reason(c, g);
      if (why) element("p", `${why[0].toUpperCase()}${why.slice(1)}.`, article, "note");
      const command = (run) =>
        `tuner estimate --model ${models[m][0]} --gpu ${gpu} ${c.settings} --set max_length=${run.tokens} ` +
        `--set micro_batch=${run.batch} --set gradient_checkpointing=${Boolean(run.recomputes)}`;
      const tiles = (entries) => {
        const list = element("dl", undefined, article, "tiles");
        for (const [label, number, note] of entries) {
          const tile = element("div", undefined, list);
          element("dt", label, tile);
          element("dd", number, tile, "number");
          element("dd", note, tile);
        }
      };
      const source = (run) => (run.traced ? "full trace" : "compiled timeline");
      const best = c.fastest;
      if (best) {
        const bar = element("div", undefined, article, "bar");
        const used = element("span", undefined, bar);
        used.style.width = `${(100 * best.gib) / gib}%`;
        used.style.background = "var(--accent)";
        bar.title = `${best.gib} of ${gib} GiB`;
        tiles([
          ["Fastest at " + whole.format(page.length), `${digits3.format(best.rate)} samples/s`, `micro-batch ${best.batch}, ${best.recomputes ? "with" : "no"} checkpointing`],
          ["Memory", `${digits3.format(best.gib)} GiB`, source(best)],
          ["Epoch", best.time, best.usd === null ? "no price" : `${usd.format(best.usd)} USD`],
          ["Longest", `${whole.format(c.longest.tokens)}`, `tokens; ${digits3.format(c.longest.gib)} GiB, ${source(c.longest)}`],
        ]);
      } else if (c.longest) {
        tiles([["Longest", `${whole.format(c.longest.tokens)}`, `tokens; ${digits3.format(c.longest.gib)} GiB, ${source(c.longest)}`]]);
      }
      if (c.remarks) element("p", `Note: ${c.remarks}.`, article, "note");
      if (best ?? c.longest) element("pre", command(best ?? c.longest), article);
    });
    history.replaceState(null, "", `#${models[m][0]}/${gpu}`);
    find("cell").showModal();
  }
  find("cell").addEventListener("close", () => history.replaceState(null, "", location.pathname));
  find("cell").addEventListener("click", (event) => { if (event.target === find("cell")) find("cell").close(); });

  show();
  const [model, gpu] = decodeURIComponent(location.hash.slice(1)).split("/");
  const m = models.findIndex(([id]) => id === model);
  const g = gpus.findIndex(([id]) => id === gpu);
  if (m >= 0 && g >= 0) open(m, g);
})();
