// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from "vitest";

import { friendly, inUnit, isSize, MIB, shown, stopOf, stops, toAmount, toBytes, toText } from "../src/sizes";

describe("reading a launch option", () => {
  it.each([
    ["256MiB", { number: "256", unit: "MiB" }],
    ["1.5 gib", { number: "1.5", unit: "GiB" }],
    ["10%", { number: "10", unit: "%" }],
    ["250MB", { number: "250", unit: "MB" }],
    [268435456, { number: "256", unit: "MiB" }],
    ["1610612736", { number: "1.5", unit: "GiB" }],
    [0, { number: "0", unit: "MiB" }],
    [1000, { number: "1000", unit: "B" }],
    ["GiB", { number: "", unit: "GiB" }],
    ["a 1 b", { number: "a 1 b", unit: "B" }],
    [null, { number: "", unit: "B" }],
  ])("reads %j", (value, amount) => {
    expect(toAmount(value)).toEqual(amount);
  });

  it.each(["256MiB", "10%", "0.5GiB", "250MB", "GiB"])("writes %s back as it was", (text) => {
    expect(toText(toAmount(text))).toBe(text);
  });
});

describe("what is a size", () => {
  it.each(["0MiB", "256MiB", ".5GiB", "1.GiB", "0%", "100%", "7B", "3kB"])("takes %s", (text) => {
    expect(isSize(toAmount(text))).toBe(true);
  });

  it.each(["MiB", "-1MiB", "1.2.3MiB", "101%", "1 parsec", "1.5B", "%"])("refuses %s", (text) => {
    expect(isSize(toAmount(text))).toBe(false);
  });

  it("knows the bytes of every unit but the share", () => {
    expect(toBytes(toAmount("64MiB"))).toBe(64 * MIB);
    expect(toBytes(toAmount("1kB"))).toBe(1000);
    expect(toBytes(toAmount("10%"))).toBeNull();
  });
});

describe("changing the unit", () => {
  it("keeps the bytes between units of bytes", () => {
    expect(inUnit(toAmount("256MiB"), "GiB", null)).toEqual({ number: "0.25", unit: "GiB" });
    expect(inUnit(toAmount("1.5GiB"), "MiB", null)).toEqual({ number: "1536", unit: "MiB" });
  });

  it("takes what a share was found to be", () => {
    expect(inUnit(toAmount("10%"), "GiB", 2048 * MIB)).toEqual({ number: "2", unit: "GiB" });
    expect(inUnit(toAmount("10%"), "GiB", null)).toEqual({ number: "1", unit: "GiB" });
    expect(inUnit(toAmount("256MiB"), "%", null)).toEqual({ number: "10", unit: "%" });
  });
});

describe("the slider", () => {
  it("goes from nothing to the limit and never back", () => {
    const all = stops(100.5 * MIB).map((bytes) => bytes / MIB);
    expect(all).toEqual([0, 16, 24, 32, 48, 64, 96, 100]);
  });

  it("has an end even where almost nothing fits", () => {
    expect(stops(0)).toEqual([0]);
    expect(stops(3 * MIB)).toEqual([0, 3 * MIB]);
  });

  it("stands at the last stop that is not above", () => {
    const all = stops(128 * MIB);
    expect(stopOf(0, all)).toBe(0);
    expect(all[stopOf(64 * MIB, all)]).toBe(64 * MIB);
    expect(all[stopOf(70 * MIB, all)]).toBe(64 * MIB);
    expect(stopOf(1e15, all)).toBe(all.length - 1);
  });

  it("gives sizes that are easy to read", () => {
    expect(friendly(1536 * MIB)).toEqual({ number: "1.5", unit: "GiB" });
    expect(friendly(100 * MIB)).toEqual({ number: "100", unit: "MiB" });
  });
});

it("shows bytes for people", () => {
  expect(shown(256 * MIB, "en")).toBe("256 MiB");
  expect(shown(1503238554, "en")).toBe("1.4 GiB");
  expect(shown(12, "en")).toBe("12 B");
});
