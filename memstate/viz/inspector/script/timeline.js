// The timeline of registers, packet by packet: a lane for each register of a request, session or cache.
const timeline = (() => {
  const LANE = 18,
    MOST = 150,
    { spans, groups, left } = data.timeline,
    body = $("#timeline .body");
  const [from, to] = data.timeline.packets;
  let hits = null,
    most = MOST;

  // Spans of one register in one group never overlap, so they share a lane.
  const lanes = new Map();
  spans.forEach((span, at) => {
    const key = `${span[0]} ${span[1]}`;
    if (!lanes.has(key)) lanes.set(key, { group: span[0], register: span[1], spans: [] });
    lanes.get(key).spans.push(at);
  });
  const newest = groups.map(() => [false, 0]); // group -> [whether it still holds a register, packet at which it began]
  for (const [group, , , , , begin, end] of spans)
    newest[group] = [newest[group][0] || end === null, newest[group][1] || begin || from];
  const order = groups.map((_, at) => at).sort((a, b) => newest[b][0] - newest[a][0] || newest[b][1] - newest[a][1]);
  const turn = new Map(order.map((group, at) => [group, at]));
  const sorted = [...lanes.values()].sort((a, b) => turn.get(a.group) - turn.get(b.group) || a.register - b.register);

  function draw() {
    if (!spans.length)
      return body.replaceChildren(
        el(
          "p",
          { class: "none" },
          "This inspection has no changes of owners. StateManager(journal=1000) keeps the last 1000.",
        ),
      );
    const width = Math.max(260, body.clientWidth),
      side = Math.min(230, width * 0.34),
      wide = width - side - 8;
    const x = (packet) => side + ((packet - from) / Math.max(1, to - from)) * wide;
    const wanted = sorted.filter((lane) => hits === null || lane.spans.some((at) => hits.has(at)));
    if (!wanted.length) return body.replaceChildren(el("p", { class: "none" }, "No match."));
    const rows = [];
    let y = 18,
      group = -1;
    for (const lane of wanted.slice(0, most)) {
      if (lane.group !== group) {
        group = lane.group;
        rows.push(svg("text", { x: 0, y: y + 15, "font-weight": 600 }, clip(groups[group], width / 6.2)));
        y += 20;
      }
      rows.push(
        svg(
          "text",
          { class: "axis", x: 12, y: y + 13 },
          clip(`${data.kinds[spans[lane.spans.at(-1)][2]]}, register ${lane.register}`, side / 5.8),
        ),
      );
      rows.push(...lane.spans.map((at) => bar(at, x, y)));
      y += LANE;
    }
    const picture = svg("svg", {
      width,
      height: y + 4,
      viewBox: `0 0 ${width} ${y + 4}`,
      role: "img",
      "aria-label": `${counted(spans.length, "span")} from packet ${from} to ${to}`,
    });
    for (const packet of ticks(wide))
      picture.append(
        svg("line", { x1: x(packet), x2: x(packet), y1: 16, y2: y }),
        svg(
          "text",
          {
            class: "axis",
            x: x(packet),
            y: 11,
            "text-anchor": packet === from ? "start" : packet === to ? "end" : "middle",
          },
          packet === from ? `packet ${packet}` : packet === to ? "now" : packet,
        ),
      );
    picture.append(...rows);
    const more = wanted.length - most;
    body.replaceChildren(
      el("div", { class: "lanes", tabindex: 0, role: "region", "aria-label": "Spans, newest owners first" }, picture),
      (more > 0 &&
        el(
          "button",
          {
            type: "button",
            class: "more",
            onclick: () => {
              most += 500;
              draw();
            },
          },
          `show ${Math.min(more, 500)} of ${more.toLocaleString("en")} more lanes`,
        )) ||
        "",
      left
        ? el(
            "p",
            { class: "hint" },
            `The page has the newest ${spans.length.toLocaleString("en")} spans; ${left.toLocaleString("en")} older ones are left out.`,
          )
        : "",
    );
  }

  function bar(at, x, y) {
    const [, register, kind, owner, label, begin, end, filled, emptied] = spans[at];
    const a = x(begin ?? from),
      b = Math.max(x(end ?? to), a + 3),
      off = !map.shown[kind] || (hits && !hits.has(at));
    const when = `${begin === null ? "filled before the journal begins" : `${filled || "filled"} in packet ${begin}`}, ${end === null ? "still held" : `${emptied || "emptied"} in packet ${end}`}`;
    const place = end === null ? owners.registers.indexOf(register) : -1;
    const shape = svg(
      "rect",
      { class: `span k${kind}${off ? " off" : ""}`, x: a, y: y + 2, width: b - a, height: LANE - 4, rx: 3 },
      svg("title", {}, `${owner}\n${label ? `${tokens(label)}, ` : ""}${when}`),
    );
    if (place >= 0) shape.addEventListener("click", () => map.choose(owners.slots[place], true));
    const text = label ? String(label) : "";
    return svg(
      "g",
      {},
      shape,
      !off && b - a > 8 + 7 * text.length && text
        ? svg("text", { class: `ink k${kind}`, x: a + 5, y: y + 13 }, text)
        : null,
    );
  }

  function ticks(wide) {
    const count = Math.max(1, Math.floor(wide / 90)),
      step = Math.max(1, Math.ceil((to - from) / count)),
      packets = [];
    for (let packet = from; packet <= to - step / 2; packet += step) packets.push(packet);
    return [...packets, to];
  }

  const clip = (text, letters) => (text.length <= letters ? text : `${text.slice(0, Math.max(1, letters - 1))}\u2026`);

  return {
    draw,
    find: (matches) =>
      new Set(spans.flatMap((span, at) => (matches(`${groups[span[0]]} ${span[3]}`, span[1]) ? [at] : []))),
    filter: (matches) => {
      hits = matches;
      most = MOST;
      draw();
    },
  };
})();
