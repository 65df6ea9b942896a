// The inspection, unpacked from the columns in the page.
const data = JSON.parse(document.getElementById("data").textContent);

function unrun(column) {
  // column: value, times, value, times, ..
  const values = [];
  for (let at = 0; at < column.length; at += 2) for (let i = 0; i < column[at + 1]; i++) values.push(column[at]);
  return values;
}

function unstep(column) {
  let sum = 0;
  return column.map((step) => (sum += step));
}

const FREE = data.kinds.indexOf("free");
const BAD = data.kinds.map((kind) => kind === "leaked" || kind === "contested");
const where = (rows, test) => rows.flatMap((row, at) => (test(row, at) ? [at] : []));
const kindOf = [FREE, ...unrun(data.map)]; // slot -> its kind; slot 0 is the null slot
const owners = { registers: unstep(data.registers), slots: data.slots, labels: data.labels, kinds: unrun(data.owners) };
const byId = new Set(data.byId),
  GROUP = "open claim group";

owners.names = (() => {
  const { forms, uses, numbers } = data.names;
  let next = 0;
  return unrun(uses).map((form, at) => {
    const known = [owners.registers[at], owners.labels[at], Math.floor(owners.registers[at] / 3)];
    return forms[form].map((part, i) => (i % 2 ? (part < 0 ? numbers[next++] : known[part]) : part)).join("");
  });
})();

const ownersOf = new Map(); // slot -> places of its owners
owners.slots.forEach((slot, at) => {
  if (ownersOf.has(slot)) ownersOf.get(slot).push(at);
  else ownersOf.set(slot, [at]);
});

const tokens = (count) => `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
];
const seconds = (count) => {
  const [size, unit] = UNITS.find(([size]) => count >= size) || [1, "s"];
  return `${(count / size).toLocaleString("en", { maximumFractionDigits: 1 })} ${unit}`;
};
const ownerNames = (slot) => [
  ...(ownersOf.get(slot) || []).map((at) => owners.names[at]),
  ...(byId.has(slot) ? [GROUP] : []),
];
