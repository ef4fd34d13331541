// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";

import { initial, read, write } from "../src/settings";
import { DEFAULTS } from "./support";

const OTHER = { key: "max_num_seqs", value: "8" };

describe("settings among the engine's additional parameters", () => {
  it("come back as they were written", () => {
    const settings = { ...initial(DEFAULTS), transport: "shm" };
    expect(read(write([OTHER], settings), DEFAULTS)).toEqual(settings);
  });

  it("leave other rows alone, unfinished ones too", () => {
    const rows = ["", OTHER];
    const written = write(rows, initial(DEFAULTS));
    expect(written.slice(0, 2)).toEqual(rows);
    expect(write(written, null)).toEqual(rows);
  });

  it("are written once, however often", () => {
    const once = write([], initial(DEFAULTS));
    expect(write(once, initial(DEFAULTS))).toEqual(once);
  });

  it("are those of the launch request", () => {
    expect(write([], initial(DEFAULTS))).toEqual([
      { key: "enable_xavier", value: "true" },
      { key: "xavier_gpu_first", value: "true" },
      { key: "xavier_gpu_cache_bytes", value: "256MiB" },
      { key: "xavier_cpu_cache_bytes", value: "10%" },
      { key: "xavier_transport", value: "auto" },
    ]);
  });

  it("are read from a history that names few of them, with bytes as numbers", () => {
    const rows = [
      { key: "xavier_gpu_first", value: true },
      { key: "xavier_gpu_cache_bytes", value: 67108864 },
    ];
    const found = { ...initial(DEFAULTS), gpu: { number: "64", unit: "MiB" } };
    expect(read(rows, DEFAULTS)).toEqual(found);
  });

  it("are not there for the built-in Xavier, nor when switched off", () => {
    expect(read([{ key: "enable_xavier", value: "true" }], DEFAULTS)).toBeNull();
    expect(read([{ key: "xavier_gpu_first", value: "false" }], DEFAULTS)).toBeNull();
    expect(read([""], DEFAULTS)).toBeNull();
  });
});
