// SPDX-License-Identifier: Apache-2.0
// What the card sets, and how it stands among the engine's additional parameters of a launch.
//
// The page's own form keeps these as rows of names and values. They are the only place where the
// settings live: so the page itself sends them with the launch, stores them in the launch history
// and for autostart, writes them into the command line to copy, and fills them in again.

import { toAmount, toText, type Amount } from "./sizes";

/** A row of the engine's additional parameters. */
export interface Row {
  key: string;
  value: unknown;
}

export interface Settings {
  gpu: Amount;
  cpu: Amount;
  transport: string;
}

/** What the server tells the page of its options. */
export interface Defaults {
  gpu: string | number;
  cpu: string | number;
  transport: string;
  transports: string[];
  /** Where the console is, if the server has one. */
  console: string | null;
}

const STOCK_SWITCH = "enable_xavier";
const SWITCH = "xavier_gpu_first";
export const GPU = "xavier_gpu_cache_bytes";
export const CPU = "xavier_cpu_cache_bytes";
export const TRANSPORT = "xavier_transport";

const OWN: ReadonlySet<string> = new Set([STOCK_SWITCH, SWITCH, GPU, CPU, TRANSPORT]);

export function initial(defaults: Defaults): Settings {
  return {
    gpu: toAmount(defaults.gpu),
    cpu: toAmount(defaults.cpu),
    transport: defaults.transport,
  };
}

/** Tell a row from what the page puts there for one that is still to be filled in. */
export function isRow(value: unknown): value is Row {
  return typeof value === "object" && value !== null && typeof Reflect.get(value, "key") === "string";
}

/** Return the settings that the rows hold, or null where they do not ask for GPU-first. */
export function read(rows: readonly unknown[], defaults: Defaults): Settings | null {
  const values = new Map(rows.filter(isRow).map((row) => [row.key, row.value]));
  if (String(values.get(SWITCH)).toLowerCase() !== "true") return null;
  const transport = values.get(TRANSPORT);
  return {
    gpu: toAmount(values.get(GPU) ?? defaults.gpu),
    cpu: toAmount(values.get(CPU) ?? defaults.cpu),
    transport: typeof transport === "string" ? transport : defaults.transport,
  };
}

/** Return the rows with these settings; null takes them out. Other rows stay as they are. */
export function write(rows: readonly unknown[], settings: Settings | null): unknown[] {
  const others = rows.filter((row) => !isRow(row) || !OWN.has(row.key));
  if (settings === null) return others;
  return [
    ...others,
    { key: STOCK_SWITCH, value: "true" },
    { key: SWITCH, value: "true" },
    { key: GPU, value: toText(settings.gpu) },
    { key: CPU, value: toText(settings.cpu) },
    { key: TRANSPORT, value: settings.transport },
  ];
}
