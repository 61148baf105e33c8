// Draws the curves of a report again: smoothed, over tokens or hours, on a log axis, zoomed, or without some runs.
// The arithmetic of axes and ticks is that of run_svg.py. Texts go in as text nodes only.
// The state is in the address: report.html#x=tokens&smooth=0.9&log=1&hide=1,2&from=10&to=20
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const G = data.geometry;
  const RIGHT = G.width - G.right, BOTTOM = G.height - G.bottom;
  const X_NAMES = { steps: "step", tokens: "tokens", hours: "hours in the training loop" };
  const state = { x: "steps", smooth: 0, log: false, hidden: new Set(), zoom: null };

  const make = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };

  const interpolate = (xs, ys, x) => {
    let low = 0, high = xs.length - 1;
    if (x <= xs[0]) return ys[0];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
  };

  const toX = (run, step) => state.x === "steps" ? step : interpolate(data.runs[run].steps, data.runs[run][state.x], step);

  // A mean of what came before, weights falling by `smooth` a point, as if there were nothing before the first.
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = sum * state.smooth + value;
      weight = weight * state.smooth + 1;
      return sum / weight;
    });
  };

  const makeTicks = (low, high, isLog) => {
    if (isLog) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      if (last - first >= 1) {
        const stride = Math.ceil((last - first + 1) / (data.ticks + 1)), ticks = [];
        for (let power = first; power <= last; power += stride) ticks.push(10 ** power);
        return ticks;
      }
    }
    let step = 10 ** Math.floor(Math.log10((high - low) / data.ticks));
    step *= [1, 2, 5, 10].find((factor) => (high - low) / (step * factor) <= data.ticks + 0.5) || 10;
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) ticks.push(n * step);
    return ticks;
  };

  const trim = (value, step) => {
    const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const text = value.toFixed(digits);
    return (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text).replace(/^-0$/, "0");
  };

  const tickTexts = (ticks) => {
    const most = Math.max(0, ...ticks.map(Math.abs));
    if (!most) return ticks.map(() => "0");
    const steps = ticks.slice(1).map((tick, n) => Math.abs(tick - ticks[n])).filter((step) => step);
    const step = steps.length ? Math.min(...steps) : most;
    if (most < 0.01) {
      const power = Math.floor(Math.log10(most) + 1e-9), unit = 10 ** power;
      return ticks.map((tick) => tick ? `${trim(tick / unit, step / unit)}e${power}` : "0");
    }
    const [unit, sign] = most >= 1e12 ? [1e12, "T"] : most >= 1e9 ? [1e9, "G"] : most >= 1e6 ? [1e6, "M"]
      : most >= 1e4 ? [1e3, "k"] : [1, ""];
    return ticks.map((tick) => trim(tick / unit, step / unit) + (tick ? sign : ""));
  };

  const axis = (low, high, start, end, isLog) => {
    const lift = isLog ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
    const place = (value) => start + (lift(value) - lift(low)) / (lift(high) - lift(low)) * (end - start);
    return { low, high, start, end, isLog, place, texts: (ticks) => {
      const isDecades = isLog && ticks.length > 1 && ticks[1] / ticks[0] > 9;
      return isDecades ? ticks.map((tick) => tickTexts([tick])[0]) : tickTexts(ticks);
    } };
  };

  const withoutFew = (lows, highs, means) => {
    const at = Math.floor(0.02 * means.length), up = (a, b) => a - b;
    const low = Math.min(...means, [...lows].sort(up)[at]), high = Math.max(...means, [...highs].sort(up)[highs.length - 1 - at]);
    const reach = high - low, least = Math.min(...lows), most = Math.max(...highs);
    return [least >= low - reach ? least : low, most <= high + reach ? most : high];
  };

  const yRange = (lows, highs, means, isLog) => {
    if (isLog) {
      lows = lows.filter((value) => value > 0);
      if (!lows.length) return [0.1, 1];
      const low = Math.min(...lows), high = Math.max(...highs);
      return high / low > 1.01 ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
    }
    if (!means.length) return [0, 1];
    const [low, high] = withoutFew(lows, highs, means);
    if (high - low <= 1e-9 * Math.abs(high)) {
      const air = Math.abs(high) / 2 || 1;
      return [low - air, high + air];
    }
    const air = 0.04 * (high - low);
    return [low >= 0 && low < 0.15 * high ? 0 : low - air, high + air];
  };

  const path = (points) => "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

  const draw = (figure) => {
    const panel = data.panels[Number(figure.dataset.panel)], svg = figure.querySelector("svg");
    const isLog = panel.log || state.log;
    const lines = panel.lines.filter((line) => !state.hidden.has(line.run)).map((line) => {
      const xs = line.x.map((step) => toX(line.run, step));
      const inside = (x) => !state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]);
      const isSmoothed = state.smooth > 0 && panel.noisy && line.y.length > data.dots;
      const shown = isSmoothed ? smoothed(line.y) : line.y;
      const places = xs.map((x, n) => n).filter((n) => inside(xs[n]));
      const take = (values) => places.map((n) => values[n]);
      return { line, isSmoothed, xs: take(xs), raw: take(line.y), shown: take(shown), steps: take(line.x),
        low: line.low.length ? take(line.low) : [], high: line.high.length ? take(line.high) : [],
        lost: line.lost.map((step) => toX(line.run, step)).filter(inside) };
    });
    const all = lines.flatMap((each) => [...each.xs.slice(0, 1), ...each.xs.slice(-1), ...each.lost]);
    const least = state.x === "hours" ? 1e-3 : 1;
    const [low, high] = state.zoom || [Math.min(0, ...all), all.length ? Math.max(...all, 0) || least : least];
    const x = axis(low, high, G.left, RIGHT, false);
    const y = axis(...yRange(lines.flatMap((each) => each.low.length ? each.low : each.raw),
      lines.flatMap((each) => each.high.length ? each.high : each.raw), lines.flatMap((each) => each.raw), isLog), BOTTOM, G.top, isLog);
    svg.replaceChildren(...drawAxes(x, y), ...drawRestarts(lines, x), ...lines.flatMap((each) => drawLine(each, x, y)));
    figure.drawn = { lines, x, y };
  };

  const drawAxes = (x, y) => {
    const nodes = [], yTicks = makeTicks(y.low, y.high, y.isLog), xTicks = makeTicks(x.low, x.high, false);
    y.texts(yTicks).forEach((text, n) => {
      const place = y.place(yTicks[n]);
      nodes.push(make("path", { class: "grid", d: `M${x.start} ${place.toFixed(1)}H${x.end}` }));
      nodes.push(make("text", { class: "tick", x: x.start - 5, y: (place + 3.5).toFixed(1), "text-anchor": "end" }, text));
    });
    x.texts(xTicks).forEach((text, n) => {
      const place = x.place(xTicks[n]).toFixed(1);
      nodes.push(make("path", { class: "axis", d: `M${place} ${y.start}v4` }));
      nodes.push(make("text", { class: "tick", x: place, y: y.start + 15, "text-anchor": "middle" }, text));
    });
    nodes.push(make("path", { class: "axis", d: `M${x.start} ${y.start}H${x.end}` }));
    const name = { class: "name", x: (x.start + x.end) / 2, y: y.start + 30, "text-anchor": "middle" };
    nodes.push(make("text", name, X_NAMES[state.x]));
    return nodes;
  };

  const drawRestarts = (lines, x) => {
    const runs = new Set(lines.map((each) => each.line.run));
    return data.restarts.filter(([run]) => runs.has(run)).map(([run, step]) => toX(run, step))
      .filter((at) => at >= x.low && at <= x.high)
      .map((at) => make("path", { class: "restart", d: `M${x.place(at).toFixed(1)} ${G.top}V${BOTTOM}` }));
  };

  const drawLine = ({ line, isSmoothed, xs, raw, shown, low, high, lost }, x, y) => {
    const nodes = [], at = xs.map(x.place);
    if (low.length) {
      const upper = at.map((left, n) => [left, y.place(Math.min(high[n], y.high))]);
      const lower = at.map((left, n) => [left, y.place(Math.max(low[n], y.low))]);
      nodes.push(make("path", { class: "band", fill: line.color, d: path([...upper, ...lower.reverse()]) + "Z" }));
    }
    const stroke = line.dash ? { stroke: line.color, "stroke-dasharray": line.dash } : { stroke: line.color };
    if (isSmoothed && at.length) {
      nodes.push(make("path", { class: "line raw", ...stroke, d: path(at.map((left, n) => [left, y.place(raw[n])])) }));
    }
    const points = at.map((left, n) => [left, y.place(shown[n])]);
    if (points.length) nodes.push(make("path", { class: "line", ...stroke, d: path(points) }));
    if (points.length && points.length <= data.dots) {
      nodes.push(...points.map(([cx, cy]) => make("circle", { fill: line.color, cx: cx.toFixed(1), cy: cy.toFixed(1), r: 2 })));
    }
    at.forEach((left, n) => {
      if (high[n] > y.high) nodes.push(make("path", { class: "beyond", d: `M${left.toFixed(1)} ${y.end}l-4 7h8Z` }));
      if (low[n] < y.low) nodes.push(make("path", { class: "beyond", d: `M${left.toFixed(1)} ${y.start}l-4 -7h8Z` }));
    });
    nodes.push(...lost.map((left) => make("path", { class: "lost", d: `M${x.place(left).toFixed(1)} ${y.start}v-7` })));
    return nodes;
  };

  // What is under the pointer, and a range of x that is dragged over becomes that of all panels.

  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  const readable = (value) => Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));

  const pointed = (figure, event) => {
    const box = figure.querySelector("svg").getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) * G.width / box.width, G.left), RIGHT);
  };

  const showTip = (figure, event) => {
    const { lines, x } = figure.drawn, left = pointed(figure, event);
    const value = x.low + (left - x.start) / (x.end - x.start) * (x.high - x.low);
    const rows = lines.filter((each) => each.xs.length).map((each) => {
      const n = each.xs.reduce((best, at, place) => Math.abs(at - value) < Math.abs(each.xs[best] - value) ? place : best, 0);
      return { each, n };
    });
    tip.replaceChildren();
    if (!rows.length) return hideTip(figure);
    const head = tip.appendChild(document.createElement("b"));
    head.textContent = `${X_NAMES[state.x]} ${readable(rows[0].each.xs[rows[0].n])}`;
    for (const { each, n } of rows.slice(0, 24)) {
      const row = tip.appendChild(document.createElement("div")), dot = row.appendChild(document.createElement("i"));
      dot.style.background = each.line.color;
      const names = [data.runs.length > 1 ? data.runs[each.line.run].label : "", each.line.key].filter((name) => name);
      const range = each.low.length ? ` (${readable(each.low[n])} to ${readable(each.high[n])})` : "";
      row.append(`${names.map((name) => name.slice(0, 40) + ": ").join("")}${readable(each.shown[n])}${range}`);
    }
    tip.style.display = "block";
    const isRight = event.clientX > window.innerWidth / 2;
    tip.style.left = `${event.clientX + window.scrollX + (isRight ? -tip.offsetWidth - 14 : 14)}px`;
    tip.style.top = `${event.clientY + window.scrollY + 14}px`;
    line(figure, "cursor", left, left + 0.5);
  };

  const line = (figure, name, from, to) => {
    const svg = figure.querySelector("svg"), sizes = { x: Math.min(from, to), width: Math.abs(to - from) };
    const rect = svg.querySelector(`.${name}`) || svg.appendChild(make("rect", { class: name, y: G.top, height: BOTTOM - G.top }));
    for (const [key, value] of Object.entries(sizes)) rect.setAttribute(key, value);
  };

  const hideTip = (figure) => {
    tip.style.display = "none";
    for (const rect of figure.querySelectorAll(".cursor, .range")) rect.remove();
  };

  const watch = (figure) => {
    let from = null;
    const svg = figure.querySelector("svg");
    svg.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? pointed(figure, event) : null; });
    svg.addEventListener("pointermove", (event) => {
      showTip(figure, event);
      if (from !== null) line(figure, "range", from, pointed(figure, event));
    });
    svg.addEventListener("pointerleave", () => { from = null; hideTip(figure); });
    svg.addEventListener("pointerup", (event) => {
      const to = pointed(figure, event), { x } = figure.drawn;
      const value = (left) => x.low + (left - x.start) / (x.end - x.start) * (x.high - x.low);
      if (from !== null && Math.abs(to - from) > 8) {
        state.zoom = [value(Math.min(from, to)), value(Math.max(from, to))];
        drawAll();
      }
      from = null;
    });
  };

  // Knobs and the address.

  const knob = (name) => document.getElementById(name);
  const figures = [...document.querySelectorAll("figure[data-panel]")];

  const drawAll = () => {
    figures.forEach(draw);
    knob("x").value = state.x;
    knob("smooth").value = state.smooth;
    knob("smooth-value").textContent = state.smooth.toFixed(2);
    knob("log").checked = state.log;
    knob("all").disabled = !state.zoom;
    for (const box of document.querySelectorAll("input[data-run]")) box.checked = !state.hidden.has(Number(box.dataset.run));
    const parts = [state.x !== "steps" && `x=${state.x}`, state.smooth && `smooth=${state.smooth}`, state.log && "log=1",
      state.hidden.size && `hide=${[...state.hidden].join(",")}`, state.zoom && `from=${state.zoom[0]}&to=${state.zoom[1]}`];
    history.replaceState(null, "", "#" + parts.filter((part) => part).join("&"));
  };

  const readAddress = () => {
    const asked = new URLSearchParams(location.hash.slice(1)), from = parseFloat(asked.get("from")), to = parseFloat(asked.get("to"));
    state.x = X_NAMES[asked.get("x")] ? asked.get("x") : "steps";
    state.smooth = Math.min(Math.max(parseFloat(asked.get("smooth")) || 0, 0), 0.99);
    state.log = asked.get("log") === "1";
    state.hidden = new Set((asked.get("hide") || "").split(",").filter((text) => text !== "").map(Number));
    state.zoom = to > from ? [from, to] : null;
  };

  if (figures.length) {
    document.documentElement.classList.add("live");
    readAddress();
    figures.forEach(watch);
    drawAll();
    knob("x").addEventListener("change", () => { state.x = knob("x").value; state.zoom = null; drawAll(); });
    knob("smooth").addEventListener("input", () => { state.smooth = Number(knob("smooth").value); drawAll(); });
    knob("log").addEventListener("change", () => { state.log = knob("log").checked; drawAll(); });
    knob("all").addEventListener("click", () => { state.zoom = null; drawAll(); });
    window.addEventListener("hashchange", () => { readAddress(); drawAll(); });
    for (const box of document.querySelectorAll("input[data-run]")) {
      box.addEventListener("change", () => {
        const run = Number(box.dataset.run);
        if (box.checked) state.hidden.delete(run); else state.hidden.add(run);
        drawAll();
      });
    }
  }
})();
