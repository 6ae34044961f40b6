"use strict";
// The numbers: what tuner.predict.evaluation, tuner.cost.compiled, allocator and roofline compute.
const calculator = (page, numbers) => {
  const { constants: c, ranks, categories, segments } = page;
  const types = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };
  const array = ([type, start, length]) => new types[type](numbers, start, length);
  const LOADING = segments.length;
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
  const cumulated = (differences) => {
    const values = Int32Array.from(differences);
    for (let place = 1; place < values.length; place++) values[place] += values[place - 1];
    return values;
  };

  // PyTorch's caching allocator for large blocks, the best fit first; bytes after each event.
  const replay = (events, sizes) => {
    const free = [], held = new Map(), allocated = [0], reserved = [0];
    let address = 0, used = 0, total = 0;
    const place = (size, from) => {
      let low = 0, high = free.length;
      while (low < high) {
        const middle = (low + high) >> 1, one = free[middle];
        if (one.size < size || (one.size === size && one.address < from)) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    const remember = (block) => { block.free = true; free.splice(place(block.size, block.address), 0, block); };
    const forget = (block) => free.splice(place(block.size, block.address), 1);
    for (const [index, sign] of events) {
      const size = sizes[index];
      if (size && sign > 0) {
        const found = place(size, -1);
        let block = free[found];
        if (block) free.splice(found, 1);
        else {
          const segment = size < c.own_segment_bytes
            ? c.large_segment_bytes : Math.ceil(size / c.round_large_bytes) * c.round_large_bytes;
          block = { address, size: segment, before: null, after: null };
          address += segment;
          total += segment;
        }
        if (block.size - size > c.small_bytes) {
          const rest = { address: block.address + size, size: block.size - size, before: block, after: block.after };
          if (rest.after) rest.after.before = rest;
          block.size = size;
          block.after = rest;
          remember(rest);
        }
        block.free = false;
        used += block.size;
        held.set(index, block);
      } else if (size) {
        const block = held.get(index), { before, after } = block;
        held.delete(index);
        used -= block.size;
        if (before?.free) {
          forget(before);
          block.address = before.address;
          block.before = before.before;
          block.size += before.size;
          if (before.before) before.before.after = block;
        }
        if (after?.free) {
          forget(after);
          block.after = after.after;
          block.size += after.size;
          if (after.after) after.after.before = block;
        }
        remember(block);
      }
      allocated.push(used);
      reserved.push(total);
    }
    return { allocated, reserved };
  };

  // Bytes that the allocator adds to those of blocks: tuner.cost.compiled.Events.replayed.
  const added = ([codes, ofSize, spans], blockBytes, accumulates) => {
    const decoded = cumulated(array(codes)), sizes = Array.from(array(ofSize), (size) => blockBytes[size]);
    const span = array(spans), numbers = segments.flatMap(([, micro], n) => (accumulates || !micro ? [n] : []));
    const last = span[2 * (segments.length - 1) + 1], end = span[2 * numbers.at(-1) + 1];
    const large = [], asked = [], allocated = [], reserved = [], places = [], small = [];
    let total = 0, smaller = 0, most = 0;
    for (let number = 0; number < last; number++) {
      const index = decoded[number] >> 1, sign = decoded[number] & 1 ? 1 : -1, size = sizes[index];
      if (size > c.small_bytes) large.push([index, sign]);
      else smaller += sign * size;
      total += sign * size;
      most = Math.max(most, smaller);
      asked.push(total);
      places.push(large.length);
      small.push([smaller, Math.ceil(most / c.small_segment_bytes) * c.small_segment_bytes]);
    }
    const pool = replay(large, sizes);
    places.forEach((place, number) => {
      allocated.push(pool.allocated[place] + small[number][0]);
      reserved.push(pool.reserved[place] + small[number][1]);
    });
    const rest = (chosen) => {
      let [most, wanted] = [0, 0];
      for (const n of chosen)
        for (let number = span[2 * n]; number < span[2 * n + 1]; number++) {
          most = Math.max(most, allocated[number]);
          wanted = Math.max(wanted, asked[number]);
        }
      return most - wanted;
    };
    let peak = 0;
    for (let number = 0; number < end; number++) peak = Math.max(peak, allocated[number]);
    const of = (phase) => numbers.filter((n) => segments[n][0] === phase);
    return {
      free: reserved[end - 1] - peak, load: rest([LOADING]), forward: rest(of("forward")),
      backward: rest(of("backward")), end: allocated[end - 1] - asked[end - 1],
    };
  };

  const memory = (structure, point, gpu, context, step, accumulates) => {
    const sizes = at(structure.sizes, point);
    const rounded = (workspace) => sizes.map((size, number) =>
      Math.ceil((number === structure.workspace ? workspace : size) / c.block_bytes - 1e-9) * c.block_bytes);
    const bytes = rounded(gpu.workspace_bytes), replayed = rounded(c.replayed_workspace_bytes);
    const differences = array(structure.counts), inSegment = array(structure.segments), live = new Int32Array(
      categories.length * sizes.length);
    const peaks = {};
    let most = 0;
    inSegment.forEach((segment, moment) => {
      for (let place = 0; place < live.length; place++) live[place] += differences[moment * live.length + place];
      most = Math.max(most, sum(byCategory(live, replayed)));
      const phase = segment === LOADING ? "load" : segments[segment][0];
      if (segment !== LOADING && segments[segment][1] && !accumulates) return;
      const parts = byCategory(live, bytes), total = sum(parts);
      if (!(peaks[phase]?.total >= total)) peaks[phase] = { total, parts };
    });
    const ends = array(structure.ends), end = accumulates ? 2 : 1;
    const parts = byCategory(ends.subarray(end * live.length, (end + 1) * live.length), bytes);
    peaks.optimizer = { total: sum(parts), parts };

    // No GPU has more than `largest_bytes`: such steps are not replayed.
    const nothing = { free: 0, load: 0, forward: 0, backward: 0, end: 0 };
    const [shallow, deep] = [structure.shallow, structure.deep].map((events) =>
      (most > c.largest_bytes ? nothing : added(events, replayed, accumulates)));
    const extra = Object.fromEntries(Object.entries(shallow).map(([name, base]) =>
      [name, name === "free" ? base : Math.round(base + structure.depth_ratio * (deep[name] - base))]));
    const [state, peak, paged] = step;
    const phases = {
      load: peaks.load.total + extra.load,
      forward: peaks.forward.total + state + extra.forward,
      backward: peaks.backward.total + state + extra.backward,
      optimizer: peaks.optimizer.total + peak + extra.end,
    };
    const phase = Object.keys(phases).reduce((best, name) => (phases[name] > phases[best] ? name : best));
    const breakdown = Object.fromEntries(categories.map((name, number) => [name, peaks[phase].parts[number]]));
    if (phase !== "load") breakdown.optimizer_state += state;
    if (phase === "optimizer") breakdown.temporary += peak - state;
    const reserved = phases[phase] + extra.free;
    breakdown.allocator_overhead = reserved - sum(Object.values(breakdown));
    breakdown.context_and_workspace += context;
    return {
      allocated_bytes: phases[phase], reserved_bytes: reserved, device_bytes: reserved + context, phase,
      breakdown, paged_bytes: paged,
    };
  };
  const byCategory = (counts, bytes) => categories.map((_, category) => {
    let total = 0;
    for (let size = 0; size < bytes.length; size++) total += counts[category * bytes.length + size] * bytes[size];
    return total;
  });

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
      const streamed = moved[row] / (gpu.bandwidth * page.bandwidth_shares[kinds[row]]);
      const fits = gpu.l2 && kinds[row] === page.cached ? Math.max(0, 1 - moved[row] / gpu.l2) : 0;
      const [traffic, least, most] = [c.l2_kept, ...c.l2_kept_ends].map((kept) => streamed * (1 - kept * fits));
      return [
        longest(work / rate, limited, traffic),
        longest((work / rate) * quickest, limited, traffic), longest((work / rate) * slowest, limited, traffic),
        longest(work / rate, limited / c.boards_differ, traffic), longest(work / rate, limited * c.boards_differ, traffic),
        longest(work / rate, limited, least), longest(work / rate, limited, most),
      ];
    });
    const executions = array(structure.executions), W = flops.length;
    const unknown = [[0, 0], [0, 0], [0, 0], [0, 0]];
    let step_s = 0;
    segments.forEach(([, micro], segment) => {
      const device = [0, 0, 0, 0, 0, 0, 0];
      let launches = 0;
      for (let row = 0; row < W; row++) {
        const times = executions[2 * segment * W + row] + executions[(2 * segment + 1) * W + row];
        launches += times;
        if (times) seconds[row].forEach((one, way) => (device[way] += times * one));
      }
      const host = launches * c.launch_s, repeats = micro ? accumulation - 1 : 1;
      const [base, ...others] = device.map((one) => Math.max(one, host));
      step_s += repeats * base;
      [...c.hosts.map((factor) => Math.max(device[0], host * factor)), ...others].forEach((one, place) =>
        (unknown[place >> 1][place & 1] += repeats * (one - base)));
    });
    const [kind, dtype] = page.update, [rate, limit] = gpu.rates[dtype], kernels = step[3];
    for (let place = 0; place < kernels.length; place += 3) {
      const [count, bytes, work] = kernels.slice(place, place + 3);
      step_s += count * longest(
        work / count / rate, limit === null ? 0 : work / count / limit,
        bytes / count / (gpu.bandwidth * page.bandwidth_shares[kind]));
    }
    const ends = inQuadrature([c.step, inQuadrature(unknown.map((pair) => pair.map((one) => 1 + one / step_s)))]);
    return { step_s, step_ends_s: ends.map((end) => step_s * end) };
  };

  const stepAt = (steps, rank) => {
    if (steps.length === 1) return steps[0];
    if (ranks.includes(rank)) return steps[ranks.indexOf(rank)];
    const place = ranks.findIndex((one) => one > rank);
    if (place < 1) return null;
    const [low, high] = steps.slice(place - 1, place + 1), between = (one, other) =>
      Math.max(0, Math.round(one + ((rank - ranks[place - 1]) / (ranks[place] - ranks[place - 1])) * (other - one)));
    if (low[3].length !== high[3].length || high[2]) return null;
    const kernels = low[3].map((one, number) => (number % 3 ? between(one, high[3][number]) : one));
    return [...[0, 1, 2].map((number) => between(low[number], high[number])), kernels];
  };

  // As `MemoryErrors.ends` of a compiled timeline.
  const deviceEnds = (used, gpu) => {
    const off = c.device, device = used.device_bytes, gap = used.reserved_bytes - used.allocated_bytes;
    const uncertain = Math.max(gap, Math.round(off.least_gap * used.reserved_bytes));
    const rest = Math.hypot(off.allocated * used.allocated_bytes, off.share * device, off.context * (device - used.reserved_bytes));
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
    const used = memory(structure, point, gpu, gpu.context_bytes[choice.method], step, accumulation > 1);
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
