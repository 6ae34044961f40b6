"use strict";
// The numbers: what tuner.cost.sized, memory, allocator and speed.roofline compute.
const calculator = (page, numbers) => {
  const { constants: c, ranks, categories, segments } = page;
  const types = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };
  const array = ([type, start, length]) => new types[type](numbers, start, length);
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Values of polynomials at [micro-batch, length, rank].
  const at = ([coefficients, exponents], point) => {
    const [c, e] = [array(coefficients), array(exponents)];
    const values = new Float64Array(c.length / 2);
    for (let row = 0; row < values.length; row++)
      for (let term = 2 * row; term < 2 * row + 2; term++)
        if (c[term])
          values[row] += c[term] * point[0] ** e[3 * term] * point[1] ** e[3 * term + 1] * point[2] ** e[3 * term + 2];
    return values;
  };
  // Differences of 2 block + (sign > 0), with repetitions (tuner.predict.portable.repeated): the sums.
  const expanded = (coded) => {
    const found = [];
    for (let place = 0; place < coded.length;) {
      const length = coded[place];
      if (length > 0) for (let n = 1; n <= length; n++) found.push(coded[place + n]);
      else for (let n = 0, from = coded[place + 1]; n < -length; n++) found.push(found[from + n]);
      place += length > 0 ? length + 1 : 2;
    }
    for (let place = 1; place < found.length; place++) found[place] += found[place - 1];
    return Int32Array.from(found);
  };

  // PyTorch's caching allocator, the best fit first: tuner.cost.allocator. Bytes allocated after each event.
  const replay = (codes, sizes) => {
    const pools = [[], []], held = new Array(sizes.length), allocated = new Float64Array(codes.length);
    let address = 0, used = 0, reserved = 0;
    const place = (free, size, from) => {
      let low = 0, high = free.length;
      while (low < high) {
        const middle = (low + high) >> 1, one = free[middle];
        if (one.size < size || (one.size === size && one.address < from)) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    const remember = (free, block) => { block.free = true; free.splice(place(free, block.size, block.address), 0, block); };
    const forget = (free, block) => free.splice(place(free, block.size, block.address), 1);
    codes.forEach((code, event) => {
      const index = code >> 1, size = sizes[index], isSmall = size <= c.small_bytes, free = pools[Number(isSmall)];
      if (size && code & 1) {
        const found = place(free, size, -1);
        let block = free[found];
        if (block) free.splice(found, 1);
        else {
          const segment = isSmall ? c.small_segment_bytes : size < c.own_segment_bytes
            ? c.large_segment_bytes : Math.ceil(size / c.round_large_bytes) * c.round_large_bytes;
          block = { address, size: segment, before: null, after: null };
          address += segment;
          reserved += segment;
        }
        const left = block.size - size;
        if (isSmall ? left >= c.block_bytes : left > c.small_bytes) {
          const rest = { address: block.address + size, size: left, before: block, after: block.after };
          if (rest.after) rest.after.before = rest;
          block.size = size;
          block.after = rest;
          remember(free, rest);
        }
        block.free = false;
        used += block.size;
        held[index] = block;
      } else if (size) {
        const block = held[index], { before, after } = block;
        used -= block.size;
        if (before?.free) {
          forget(free, before);
          block.address = before.address;
          block.before = before.before;
          block.size += before.size;
          if (before.before) before.before.after = block;
        }
        if (after?.free) {
          forget(free, after);
          block.after = after.after;
          block.size += after.size;
          if (after.after) after.after.before = block;
        }
        remember(free, block);
      }
      allocated[event] = used;
    });
    return { allocated, reserved };
  };

  // All events with those of the optimizer between, and where phases begin: tuner.cost.sized.SizedTimeline.at.
  const sequence = (structure, update) => {
    const own = expanded(array(structure.events)), blocks = structure.numbers[2], spans = array(structure.spans);
    const theirs = expanded(array(update.events)).map((code) => code + 2 * blocks);
    const codes = [], marks = [], born = new Uint8Array(blocks);
    const add = (some) => some.forEach((code) => {
      if (code >> 1 < blocks && code & 1) born[code >> 1] = 1;
      if (code >> 1 >= blocks || born[code >> 1]) codes.push(code);  // not a free of what was never allocated
    });
    for (let place = 0; place < spans.length; place += 4) {
      const [start, end, number, step] = spans.subarray(place, place + 4), phase = page.phases[number];
      if (phase === "forward" && !step) add(theirs.subarray(0, update.first));
      marks.push([codes.length, phase]);
      if (phase === "optimizer") add(step ? theirs.subarray(update.second) : theirs.subarray(update.first, update.second));
      add(own.subarray(start, end));
    }
    return { codes, marks };
  };

  // tuner.cost.memory.peak_memory.
  const memory = (structure, point, gpu, context, update) => {
    const whole = (size) => Math.ceil(size / c.block_bytes) * c.block_bytes;
    const sizes = at(structure.sizes, point).map(Math.round);
    if (structure.workspace >= 0) sizes[structure.workspace] = gpu.workspace_bytes;
    const theirs = update.rows, rows = [...array(structure.rows), ...theirs];
    const bytes = Array.from(array(structure.numbers), (number) => sizes[number]).concat(
      update.sizes.map((size, block) => (theirs[block] < 0 ? 0 : size))).map(whole);
    const { codes, marks } = sequence(structure, update), { allocated, reserved } = replay(codes, bytes);
    const peaks = { load: 0, forward: 0, backward: 0, optimizer: 0 };
    marks.forEach(([start, phase], number) => {
      const end = marks[number + 1]?.[0] ?? codes.length;
      for (let event = Math.max(start - 1, 0); event < end; event++) peaks[phase] = Math.max(peaks[phase], allocated[event]);
    });
    const peakAt = allocated.reduce((best, size, event) => (size > allocated[best] ? event : best), 0);
    const parts = new Float64Array(categories.length);
    for (let event = 0; event <= peakAt; event++)
      if (bytes[codes[event] >> 1]) parts[rows[codes[event] >> 1]] += (codes[event] & 1 ? 1 : -1) * bytes[codes[event] >> 1];
    const breakdown = Object.fromEntries(categories.map((name, number) => [name, parts[number]]));
    breakdown.allocator_overhead = reserved - sum(Object.values(breakdown));
    breakdown.context_and_workspace += context;
    const paged = update.sizes.reduce((total, size, block) => total + (theirs[block] < 0 ? size : 0), 0);
    return {
      allocated_bytes: allocated[peakAt], reserved_bytes: reserved, device_bytes: reserved + context,
      phase: Object.keys(peaks).reduce((best, name) => (peaks[name] > peaks[best] ? name : best)), breakdown, paged_bytes: paged,
    };
  };

  // Share of a product's tiles and waves that is not padding: tuner.cost.speed.rates.tile_use.
  const tileUse = (batch, m, n, k, multiprocessors) => {
    const side = (size) => (size >= c.tile ? c.tile : Math.ceil(size / 16) * 16);
    const [tileM, tileN] = [side(m), side(n)], [tilesM, tilesN] = [Math.ceil(m / tileM), Math.ceil(n / tileN)];
    let waves = (batch * tilesM * tilesN) / multiprocessors;
    if (waves < 1) waves = Math.min(1, waves * Math.max(1, Math.floor(k / 512)));
    return (((m * n) / (tilesM * tilesN * tileM * tileN)) * waves) / (Math.ceil(waves) + c.fill);
  };
  const longest = (...bounds) => Math.max(c.kernel_s, ...bounds);
  const inQuadrature = (ends) => [
    Math.exp(-Math.hypot(...ends.map(([low]) => Math.log(low)))),
    Math.exp(Math.hypot(...ends.map(([, high]) => Math.log(high)))),
  ];

  const time = (structure, point, gpu, step, accumulation) => {
    const [flops, tensors, shapes] = [structure.flops, structure.tensors, structure.shapes].map((t) => at(t, point));
    const moved = new Float64Array(flops.length), tensorOf = array(structure.tensor_of);
    tensors.forEach((bytes, tensor) => (moved[tensorOf[tensor]] += bytes));
    const [kinds, dtypes, attention, hasShape] = ["kinds", "dtypes", "attention", "has_shape"].map((name) =>
      array(structure[name]));
    // Seconds of each operator: as predicted, with quick and slow arithmetic, on good and bad boards, and
    // where the L2 cache keeps much and nothing.
    const seconds = Array.from(flops, (work, row) => {
      let [rate, limit, quickest, slowest] = gpu.rates[dtypes[row]];
      if (attention[row] >= 0) {
        let tokens;
        [rate, quickest, slowest, tokens] = gpu.attention[attention[row]];
        rate /= 1 + tokens / shapes[4 * row + 2];
      } else if (hasShape[row]) rate *= tileUse(...shapes.subarray(4 * row, 4 * row + 4), gpu.multiprocessors);
      const limited = limit === null ? 0 : work / limit;
      const streamed = moved[row] / gpu.bandwidths[kinds[row]];
      const fits = gpu.l2 && kinds[row] === page.cached ? Math.max(0, 1 - moved[row] / gpu.l2) : 0;
      const [traffic, least, most] = [c.l2_kept, ...c.l2_kept_ends].map((kept) => streamed * (1 - kept * fits));
      return [
        longest(work / rate, limited, traffic),
        longest((work / rate) * quickest, limited, traffic), longest((work / rate) * slowest, limited, traffic),
        longest(work / rate, limited / c.boards_differ, traffic), longest(work / rate, limited * c.boards_differ, traffic),
        longest(work / rate, limited, least), longest(work / rate, limited, most),
      ];
    });
    const [executions, launches, waits] = ["executions", "launches", "waits"].map((name) => array(structure[name]));
    const unknown = [[0, 0], [0, 0], [0, 0], [0, 0]], W = flops.length, [launch_s, ...otherHosts] = gpu.launches_s;
    let step_s = 0;
    segments.forEach(([, micro], segment) => {
      // Of a pass and of what it recomputes: seconds of the device, one for each way, and launches of the host.
      const halves = [1, c.recomputed].map((each, half) => {
        const found = { device: [0, 0, 0, 0, 0, 0, 0], host: 0, waits: false };
        for (let row = 0; row < W; row++) {
          const times = executions[(2 * segment + half) * W + row];
          if (!times) continue;
          seconds[row].forEach((one, way) => (found.device[way] += times * one));
          found.host += times * launches[row] * each;
          found.waits ||= waits[row] > 0;
        }
        return found;
      });
      const inTurns = halves.some((half) => half.waits), repeats = micro ? accumulation - 1 : 1;
      const passed = (way, launch) => (inTurns
        ? sum(halves.map((half) => Math.max(half.device[way], half.host * launch)))
        : Math.max(sum(halves.map((half) => half.device[way])), sum(halves.map((half) => half.host)) * launch));
      const base = passed(0, launch_s);
      step_s += repeats * base;
      [...otherHosts.map((launch) => passed(0, launch)), ...[1, 2, 3, 4, 5, 6].map((way) => passed(way, launch_s))].forEach(
        (one, place) => (unknown[place >> 1][place & 1] += repeats * (one - base)));
    });
    step_s += (c.trained * structure.trained + step.launches) * launch_s;
    const [theirKinds, theirTypes, times] = ["kinds", "dtypes", "times"].map((name) => array(step[name]));
    times.forEach((count, row) => {
      const [rate, limit] = gpu.rates[theirTypes[row]];
      step_s += count * longest(
        step.flops[row] / rate, limit === null ? 0 : step.flops[row] / limit,
        step.moved[row] / gpu.bandwidths[theirKinds[row]]);
    });
    const ends = inQuadrature([c.step, inQuadrature(unknown.map((pair) => pair.map((one) => 1 + one / step_s)))]);
    return { step_s, step_ends_s: ends.map((end) => step_s * end) };
  };

  // The steps of an optimizer at a rank of LoRA, or on the line through its neighbours: tuner.predict.shipped.
  const stepAt = (steps, rank) => {
    const with_ = (step, numbers) => ({ ...step, ...Object.fromEntries(["sizes", "flops", "moved"].map((name) => [name, numbers(name)])) });
    const known = steps[0] ?? steps[rank];
    if (known) return { ...with_(known, (name) => [...array(known[name])]), rows: array(known.rows) };
    const place = ranks.findIndex((one) => one > rank);
    if (place < 1) return null;
    const [low, high] = ranks.slice(place - 1, place + 1).map((one) => steps[one]);
    const alike = ["events", "times", "kinds", "dtypes"].every((name) => low[name].join() === high[name].join());
    if (!alike) return null;
    const share = (rank - ranks[place - 1]) / (ranks[place] - ranks[place - 1]);
    const found = with_(low, (name) => {
      const [first, second] = [low, high].map((step) => array(step[name]));
      return Array.from(first, (one, row) => evenly(one + share * (second[row] - one)));
    });
    const [sizes, rows, others] = [high.sizes, low.rows, high.rows].map((name) => array(name));
    // Ranks double: one power of two is the bytes of an element that is paged at the higher alone.
    found.rows = found.sizes.map((size, block) => {
      const item = 2 ** Math.floor(Math.log2(Math.max(sizes[block] / c.paged_elements, 1)));
      return (size >= item * c.paged_elements ? others : rows)[block];
    });
    return found;
  };
  // A half goes to the even neighbour, as in Python.
  const evenly = (value) => (value % 1 === 0.5 && Math.floor(value) % 2 === 0 ? Math.floor(value) : Math.round(value));

  // As `MemoryErrors.ends`.
  const deviceEnds = (used, gpu) => {
    const off = c.device, device = used.device_bytes, gap = used.reserved_bytes - used.allocated_bytes;
    const uncertain = Math.max(gap, Math.round(off.least_gap * used.reserved_bytes));
    const rest = Math.hypot(off.allocated * used.allocated_bytes, off.context * (device - used.reserved_bytes));
    const high = device + Math.hypot(rest, off.gap_above * uncertain), usual = Math.hypot(rest, off.gap_below * uncertain);
    const low = device - (high > gpu.limit_bytes ? Math.max(usual, gap + rest) : usual);
    return [low, high].map(Math.round);
  };

  // The answer for a choice of fields; `refused` says why there is none.
  return (choice) => {
    const model = page.models.find((one) => one.name === choice.model);
    const gpu = page.gpus.find((one) => one.id === choice.gpu);
    if (gpu.refused[choice.method]) return { refused: gpu.refused[choice.method] };
    const { batch, tokens: length } = choice, rank = choice.method === "full" ? 0 : choice.rank;
    if (model.positions && length > model.positions)
      return { refused: `${model.name} has ${model.positions.toLocaleString("en")} positions, and ${length.toLocaleString("en")} tokens are asked for` };
    const beyond = model.window !== null && length >= model.window;
    const inOneTile = batch * (length - 1) <= c.tile_tokens;
    const key = [choice.method, gpu.kernels, choice.checkpointing, batch === 1, beyond, inOneTile].map((word) =>
      typeof word === "boolean" ? Number(word) : word).join("/");
    const structure = page.structures[model.structures[key]];
    const options = page.methods.find((one) => one.id === choice.method).options;
    if (!structure) return { options, refused: "these settings are not among the timelines of this page" };
    const steps = page.steps[structure.optimizers[choice.optimizer]], step = steps && stepAt(steps, rank);
    if (!step) return { options, refused: `optimizer ${choice.optimizer} at rank ${rank} is not among the timelines of this page` };
    const accumulation = 1, point = [batch, length, rank];
    const used = memory(structure, point, gpu, gpu.context_bytes[choice.method], step);
    const spent = time(structure, point, gpu, step, accumulation), samples = batch * accumulation;
    const [low, high] = deviceEnds(used, gpu);
    const fits = used.device_bytes <= gpu.usable_bytes;
    const spent_s = (spent.step_s * c.samples) / samples;
    return {
      ...used, ...spent, options, gpu, accumulation, samples, fits,
      verdict: low > gpu.limit_bytes ? "does not fit" : fits && high <= gpu.limit_bytes ? "fits" : "tight",
      device_ends_bytes: [low, high], samples_per_s: samples / spent.step_s,
      tokens_per_s: (samples * length) / spent.step_s, spent_s,
      usd: gpu.price === null ? null : (spent_s / 3600) * gpu.price,
    };
  };
};
