(async () => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const find = (id) => document.getElementById(id);
  const form = document.querySelector("form"), fields = form.elements;
  const element = (name, text, parent) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  };
  const GIB = 2 ** 30;
  const colours = ["#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#e45756", "#b279a2", "#9d755d", "#8b95a5"];
  const tones = { fits: "good", tight: "near", "does not fit": "bad" };

  // As tuner.core.units writes numbers and times.
  const significant = (value, digits = 3) => {
    if (!value) return "0";
    const rounded = Number(value.toPrecision(digits));
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(rounded)) + 1e-12));
    return rounded.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  };
  const duration = (seconds) => {
    const two = (value) => String(value).padStart(2, "0");
    if (seconds < 60) return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(0)} ms`;
    const minutes = Math.round(seconds / 60), whole = Math.round(seconds), hours = Math.round(seconds / 3600);
    if (minutes < 60) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
    return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  const gib = (bytes) => significant(bytes / GIB);
  const ofLimit = (used, limit) => {
    const pair = [3, 4, 5].map((digits) => [used, limit].map((size) => significant(size / GIB, digits))).find(([one, other]) => one !== other);
    return pair ? pair.join(" of ") : `all ${gib(limit)}`;
  };
  const leaning = ({ verdict, fits, device_bytes, gpu }) => verdict !== "tight" ? ""
    : fits ? " (likely fits)" : device_bytes > gpu.limit_bytes ? " (likely not)" : " (within headroom)";
  const usd = (amount) => (amount >= 1 ? amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : significant(amount, 2));

  const options = (select, values) => values.forEach(([value, text]) => (element("option", text, select).value = value));
  options(fields.model, page.models.map(({ name }) => [name, name]));
  options(fields.gpu, page.gpus.map((gpu) => [gpu.id, `${gpu.name.replace("NVIDIA ", "")}, ${significant(gpu.limit_bytes / GIB)} GiB`]));
  options(fields.method, page.methods.map(({ id, title }) => [id, title]));
  options(fields.optimizer, page.optimizers.map((name) => [name, name]));

  const names = ["model", "gpu", "method", "batch", "tokens", "rank", "optimizer"];
  const restore = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of names) {
      const value = given.get(name), field = fields[name];
      if (value !== null && (!field.options || [...field.options].some((one) => one.value === value))) field.value = value;
    }
    if (given.has("checkpointing")) fields.checkpointing.checked = given.get("checkpointing") === "true";
  };
  const choice = () => ({
    ...Object.fromEntries(names.map((name) => [name, fields[name].value])),
    batch: fields.batch.valueAsNumber, tokens: fields.tokens.valueAsNumber, rank: fields.rank.valueAsNumber,
    checkpointing: fields.checkpointing.checked,
  });
  const command = (chosen, found) => [
    `tuner estimate --model ${chosen.model} --gpu ${chosen.gpu}`, found.options, `--batch-size ${chosen.batch} --seq-len ${chosen.tokens}`,
    chosen.method === "full" ? "" : `--lora-rank ${chosen.rank}`,
    `--set gradient_checkpointing=${chosen.checkpointing} --set optimizer=${chosen.optimizer}`,
  ].filter(Boolean).join(" ");

  const bytes = Uint8Array.from(atob(find("arrays").textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const calculate = calculator(page, await new Response(stream).arrayBuffer());

  const show = () => {
    fields.rank.disabled = fields.method.value === "full";
    const chosen = choice(), link = `#${new URLSearchParams(chosen)}`, wrong = form.querySelector(":invalid");
    const found = wrong ? { refused: `${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}` } : calculate(chosen);
    const verdict = find("verdict");
    verdict.textContent = "";
    find("numbers").hidden = Boolean(found.refused);
    find("reproduce").hidden = !found.options;
    document.body.style.setProperty("--tone", found.refused ? "var(--near)" : `var(--${tones[found.verdict]})`);
    if (found.options) find("command").textContent = command(chosen, found);
    find("link").href = link;
    find("copied").textContent = "";
    if (!wrong) history.replaceState(null, "", link);
    element("b", found.refused ? "not known" : `${found.verdict}${leaning(found)}`, verdict);
    if (found.refused) {
      verdict.append(`: ${found.refused}`);
      return;
    }
    const { gpu } = found, [low, high] = found.device_ends_bytes;
    verdict.append(`: ${ofLimit(found.device_bytes, gpu.limit_bytes)} GiB on ${gpu.id} `);
    element("small", `(90 %: ${gib(low)} to ${gib(high)})`, verdict);

    const most = Math.max(gpu.limit_bytes, high) * 1.02, percent = (size) => `${(100 * size) / most}%`;
    const parts = Object.entries(found.breakdown).map(([name, size], number) => [name.replaceAll("_", " "), size, colours[number]]);
    const shown = parts.filter(([, size]) => size >= 2 ** 20), bar = find("bar"), table = find("parts");
    bar.textContent = table.textContent = "";
    for (const [name, size, colour] of shown) {
      Object.assign(element("span", undefined, bar).style, { width: percent(size), background: colour });
      const row = element("tr", undefined, table), head = element("th", undefined, row);
      head.scope = "row";
      element("i", undefined, head).style.background = colour;
      head.append(name);
      element("td", `${gib(size)} GiB`, row);
    }
    const limit = element("span", undefined, bar), interval = element("span", undefined, bar);
    limit.className = "limit";
    limit.style.left = percent(gpu.limit_bytes);
    interval.className = "interval";
    Object.assign(interval.style, { left: percent(low), width: percent(high - low) });
    find("scale").textContent = `The upright line is the limit, ${gib(gpu.limit_bytes)} GiB; the line below is the 90 % interval.`;
    find("phase").textContent = `in the ${found.phase === "load" ? "loading" : `${found.phase} phase`}`;
    const tiles = find("tiles");
    tiles.textContent = "";
    const [fast, slow] = found.step_ends_s.map((end) => (found.samples * chosen.tokens) / end);
    for (const [title, number, note] of [
      ["Speed", `${significant(found.tokens_per_s)} tokens/s`, `90 %: ${significant(slow)} to ${significant(fast)}; ${significant(found.samples_per_s)} samples/s`],
      ["Time", duration(found.spent_s), `per ${page.constants.samples.toLocaleString("en")} samples; ${duration(found.step_s)} per optimizer step of ${found.samples}`],
      ["Cost", found.usd === null ? "unknown" : `${usd(found.usd)} USD`, found.usd === null ? "no offer of this GPU type was found at RunPod, Lambda or Akash" : `per ${page.constants.samples.toLocaleString("en")} samples, at ${significant(gpu.price)} USD per hour${gpu.price_date ? ` (price of ${gpu.price_date})` : ""}`],
      ...(found.paged_bytes ? [["Paged", `${gib(found.paged_bytes)} GiB`, "managed memory of the optimizer, which moves to the host where the GPU is full"]] : []),
    ]) {
      const group = element("div", undefined, tiles);
      element("dt", title, group);
      element("dd", number, group).className = "number";
      element("dd", note, group);
    }
  };

  [fields.model.value, fields.gpu.value] = ["qwen3-8b", "rtx4090"].map((name, place) =>
    [...[fields.model, fields.gpu][place].options].some((one) => one.value === name) ? name : [fields.model, fields.gpu][place].value);
  restore();
  show();
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { restore(); show(); });
  find("copy").addEventListener("click", async () => {
    const text = find("command");
    try {
      await navigator.clipboard.writeText(text.textContent);
      find("copied").textContent = "copied";
    } catch {
      getSelection().selectAllChildren(text);
      find("copied").textContent = "selected: copy it with the keyboard";
    }
  });
  window.calculate = (chosen) => {
    const found = calculate(chosen);
    return found.refused ? found : { ...found, command: command(chosen, found) };
  };
})();
