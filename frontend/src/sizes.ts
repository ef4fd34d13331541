// SPDX-License-Identifier: Apache-2.0
// Budgets as a person enters them: a number and a unit. The server reads the same texts.

/** A budget as entered: `number` is what was typed, which may be no number yet. */
export interface Amount {
  number: string;
  unit: string;
}

const KIB = 1024;
export const MIB = KIB ** 2;
const GIB = KIB ** 3;
const TIB = KIB ** 4;

/** Bytes of each unit. Lower case: units are read without regard to it. */
const SCALES: ReadonlyMap<string, number> = new Map([
  ["b", 1],
  ["kb", 1e3],
  ["mb", 1e6],
  ["gb", 1e9],
  ["tb", 1e12],
  ["kib", KIB],
  ["mib", MIB],
  ["gib", GIB],
  ["tib", TIB],
]);

/** The units that the card offers; one that came from elsewhere is offered beside them. */
export const UNITS = ["MiB", "GiB", "TiB", "%"] as const;

/** Shown by the slider where the server knows no limit. */
export const UNKNOWN_LIMIT = 64 * GIB;

const ENTERED = /^\s*(-?[\d.]*)\s*([^\d\s.-]*)\s*$/;
const NUMBER = /^(\d+(\.\d*)?|\.\d+)$/;

/** Read a launch option's value: bytes, or a text such as "256MiB" or "10%". */
export function toAmount(value: unknown): Amount {
  const text = typeof value === "string" || typeof value === "number" ? String(value) : "";
  const match = ENTERED.exec(text);
  if (!match) return { number: text, unit: "B" };
  const [, number = "", unit = ""] = match;
  if (unit !== "") return { number, unit: UNITS.find((known) => same(known, unit)) ?? unit };
  return NUMBER.test(number) ? friendly(Number(number)) : { number, unit: "B" };
}

/** Return the launch option's value. */
export function toText({ number, unit }: Amount): string {
  return `${number}${unit}`;
}

/** Return the bytes, or null for a share of memory and for what is no size. */
export function toBytes({ number, unit }: Amount): number | null {
  const scale = SCALES.get(unit.toLowerCase());
  return scale === undefined || !NUMBER.test(number) ? null : Math.floor(Number(number) * scale);
}

export function isShare(amount: Amount): boolean {
  return amount.unit === "%";
}

/** Tell whether the server could read it as a size at all. */
export function isSize(amount: Amount): boolean {
  if (isShare(amount)) return NUMBER.test(amount.number) && Number(amount.number) <= 100;
  const whole = amount.unit.toLowerCase() !== "b" || Number.isInteger(Number(amount.number));
  return whole && toBytes(amount) !== null;
}

/** Return bytes in the largest unit that needs no more than one decimal. */
export function friendly(bytes: number): Amount {
  for (const [unit, scale] of [["TiB", TIB], ["GiB", GIB], ["MiB", MIB]] as const) {
    const tenths = (bytes / scale) * 10;
    if (bytes >= scale && Number.isInteger(tenths)) return { number: String(tenths / 10), unit };
  }
  return bytes === 0 ? { number: "0", unit: "MiB" } : { number: String(bytes), unit: "B" };
}

/**
 * Return the amount in another unit. Between bytes and shares there is no rule without knowing the
 * memory: `resolved` is what a share was found to be, in bytes.
 */
export function inUnit(amount: Amount, unit: string, resolved: number | null): Amount {
  const scale = SCALES.get(unit.toLowerCase());
  if (scale === undefined) return { number: "10", unit };
  const bytes = toBytes(amount) ?? resolved;
  if (bytes === null) return { number: "1", unit };
  return { number: String(Number((bytes / scale).toFixed(2))), unit };
}

/** Bytes for people, as the server writes them: "256 MiB", "1.40 GiB". */
export function shown(bytes: number, language: string): string {
  let unit = "B";
  let scale = 1;
  for (const [name, size] of [["KiB", KIB], ["MiB", MIB], ["GiB", GIB], ["TiB", TIB]] as const) {
    if (bytes >= size) [unit, scale] = [name, size];
  }
  const number = new Intl.NumberFormat(language, { maximumFractionDigits: 2 });
  return `${number.format(bytes / scale)} ${unit}`;
}

/** The slider's stops in bytes: 0, then steps of a half or a third more, then the limit itself. */
export function stops(limit: number): number[] {
  const found = [0];
  for (let step = 16 * MIB; step < limit; step *= 2) {
    found.push(step);
    if (step * 1.5 < limit) found.push(step * 1.5);
  }
  const end = Math.floor(limit / MIB) * MIB;
  if (end > (found.at(-1) ?? 0)) found.push(end);
  return found;
}

/** Return the index of the last stop that is not above `bytes`. */
export function stopOf(bytes: number, all: readonly number[]): number {
  return Math.max(
    0,
    all.findLastIndex((stop) => stop <= bytes),
  );
}

function same(one: string, other: string): boolean {
  return one.toLowerCase() === other.toLowerCase();
}
