// The data of the page: columns read, and what is known at every moment. Moment k is the state after the first k events.

const page = JSON.parse(document.getElementById("data").textContent);

/** Reads a column: base64 of zigzag varints of the differences between rows. */
function column(text) {
  const raw = atob(text);
  let rows = 0;
  for (let i = 0; i < raw.length; i++) if (raw.charCodeAt(i) < 128) rows++;
  const values = new Float64Array(rows);
  let row = 0, value = 0, bits = 0, scale = 1;
  for (let i = 0; i < raw.length; i++) {
    const byte = raw.charCodeAt(i);
    bits += (byte & 127) * scale;
    scale *= 128;
    if (byte < 128) {
      value += bits % 2 ? -(bits + 1) / 2 : bits / 2;
      values[row++] = value;
      bits = 0;
      scale = 1;
    }
  }
  return values;
}

const START = 0, FREED = 1, END = 2;

/** One rank, ready to be drawn. */
class Rank {
  constructor(json) {
    Object.assign(this, json);
    this.moments = this.events + 1;
    this.times = json.times === null ? null : column(json.times);
    this.blocks = this.lives(json.blocks);
    this.segments = this.lives(json.segments);
    const { start, freed, end } = this.blocks;
    for (let i = 0; i < start.length; i++) {
      freed[i] += start[i];
      end[i] += freed[i];
    }
    for (let i = 0; i < this.segments.start.length; i++) this.segments.end[i] += this.segments.start[i];
    this.siteOf = Int32Array.from(this.blocks.stack, (stack) => this.stacks[stack].site);
    this.listChanges();
    this.sumUp();
  }

  /** The columns of a table of lives, by name. */
  lives(table) {
    return Object.fromEntries(Object.entries(table).map(([name, text]) => [name, column(text)]));
  }

  /** Sorts the changes of blocks by moment: those of moment k are `changes[firstChange[k]]` up to `firstChange[k + 1]`, as 3 × block + kind. */
  listChanges() {
    const { start, freed, end } = this.blocks, first = new Uint32Array(this.moments + 2);
    const each = (visit) => {
      for (let i = 0; i < start.length; i++) {
        visit(start[i], 3 * i + START);
        if (freed[i] < this.moments) visit(freed[i], 3 * i + FREED);
        if (end[i] < this.moments) visit(end[i], 3 * i + END);
      }
    };
    each((moment) => first[moment + 1]++);
    for (let k = 1; k < first.length; k++) first[k] += first[k - 1];
    const place = first.slice();
    this.changes = new Uint32Array(first[this.moments]);
    each((moment, change) => { this.changes[place[moment]++] = change; });
    this.firstChange = first;
  }

  /** Bytes allocated, pending and reserved at every moment. */
  sumUp() {
    this.allocatedAt = new Float64Array(this.moments);
    this.pendingAt = new Float64Array(this.moments);
    this.reservedAt = new Float64Array(this.moments + 1);
    let allocated = 0, pending = 0;
    for (let k = 0; k < this.moments; k++) {
      for (let c = this.firstChange[k]; c < this.firstChange[k + 1]; c++) {
        const size = this.blocks.size[Math.floor(this.changes[c] / 3)], kind = this.changes[c] % 3;
        allocated += kind === START ? size : kind === FREED ? -size : 0;
        pending += kind === FREED ? size : kind === END ? -size : 0;
      }
      this.allocatedAt[k] = allocated;
      this.pendingAt[k] = pending;
    }
    const { start, end, size } = this.segments;
    for (let i = 0; i < start.length; i++) {
      this.reservedAt[start[i]] += size[i];
      if (end[i] < this.moments) this.reservedAt[end[i]] -= size[i];
    }
    for (let k = 1; k < this.moments; k++) this.reservedAt[k] += this.reservedAt[k - 1];
  }

  /** Seconds from the first event to a moment. */
  secondsAt(moment) {
    return this.times === null || this.events === 0 ? 0 : this.times[Math.min(Math.max(moment - 1, 0), this.events - 1)] / 1e6;
  }

  isThere(block, moment) {
    return this.blocks.start[block] <= moment && moment < this.blocks.end[block];
  }

  isAllocated(block, moment) {
    return this.blocks.start[block] <= moment && moment < this.blocks.freed[block];
  }

  /** The blocks that are there at a moment, by address. */
  blocksAt(moment) {
    const live = [], { address } = this.blocks;
    for (let i = 0; i < address.length; i++) if (this.isThere(i, moment)) live.push(i);
    return live.sort((a, b) => address[a] - address[b]);
  }

  /** The segments that are there at a moment, by address, with their blocks. Neighbouring pages of an expandable segment are one. */
  segmentsAt(moment) {
    const { address, size, start, end, stream, pool, expandable } = this.segments, live = [];
    for (let i = 0; i < start.length; i++) if (start[i] <= moment && moment < end[i]) live.push(i);
    live.sort((a, b) => address[a] - address[b]);
    const segments = [];
    for (const i of live) {
      const last = segments[segments.length - 1];
      if (last && expandable[i] && last.expandable && last.end === address[i] && last.stream === stream[i]) {
        last.end += size[i];
        last.pool = Math.max(last.pool, pool[i]);
      } else {
        segments.push({ address: address[i], end: address[i] + size[i], stream: stream[i], pool: pool[i], expandable: expandable[i] === 1, blocks: [], used: 0 });
      }
    }
    let next = 0;
    for (const block of this.blocksAt(moment)) {
      const at = this.blocks.address[block];
      while (next < segments.length && segments[next].end <= at) next++;
      if (next === segments.length) break;
      if (segments[next].address <= at) {
        segments[next].blocks.push(block);
        segments[next].used += this.blocks.size[block];
      }
    }
    return segments;
  }

  /** Bytes allocated and number of blocks by site at a moment. */
  sitesAt(moment) {
    const sums = this.sites.map(() => ({ bytes: 0, blocks: 0 }));
    for (let i = 0; i < this.siteOf.length; i++) {
      if (!this.isAllocated(i, moment)) continue;
      sums[this.siteOf[i]].bytes += this.blocks.size[i];
      sums[this.siteOf[i]].blocks++;
    }
    return sums;
  }

  /** Bytes of a site that are freed and wait for events at a moment. */
  pendingOf(site, moment) {
    let sum = 0;
    for (let i = 0; i < this.siteOf.length; i++) {
      if (this.siteOf[i] === site && this.isThere(i, moment) && !this.isAllocated(i, moment)) sum += this.blocks.size[i];
    }
    return sum;
  }

  /** An address as the snapshot has it. */
  addressText(offset) {
    return "0x" + (BigInt(this.base_address) + BigInt(offset)).toString(16);
  }

  streamText(stream) {
    return this.streams[stream] === "0" ? "the default stream" : "stream 0x" + BigInt(this.streams[stream]).toString(16);
  }

  /** A moment in words: the last event, counted from 0 as `harness explain --at` does, and its time. */
  momentText(moment) {
    const time = this.times === null ? "" : `, ${duration(this.secondsAt(moment))}${this.simulated_times ? " (model time)" : ""}`;
    return moment === 0 ? "before the first event" : `event ${count(moment - 1)}${time}`;
  }
}

/** `41.02 MiB`, as everywhere in the project. */
function bytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let value = amount, unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  const digits = value.toFixed(2);
  return (digits.endsWith(".00") || unit === 0 ? Math.round(value) : digits) + " " + units[unit];
}

function duration(seconds) {
  const digits = (value) => Number(value.toPrecision(3)).toString();
  if (seconds >= 1 || seconds === 0) return Number(seconds.toFixed(seconds < 100 ? 2 : 0)) + " s";
  return seconds >= 1e-3 ? digits(seconds * 1e3) + " ms" : digits(seconds * 1e6) + " µs";
}

function count(number) {
  return number.toLocaleString("en-US");
}
