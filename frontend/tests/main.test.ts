// SPDX-License-Identifier: Apache-2.0
import { afterEach, beforeEach, expect, it, vi } from "vitest";

import { answerPlans, at, DEFAULTS, FakeStore, json, openDialog, plan, vllm } from "./support";

beforeEach(async () => {
  at("/launch-model/llm");
  answerPlans(() => json(plan()));
  if (document.querySelector("script")) return;
  const script = document.createElement("script");
  script.dataset.xavier = JSON.stringify(DEFAULTS);
  document.head.append(script);
  await import("../src/main");
});

afterEach(() => {
  document.body.replaceChildren();
  vi.unstubAllGlobals();
});

async function settled(): Promise<void> {
  await new Promise((resolve) => setTimeout(resolve, 0));
  await new Promise((resolve) => requestAnimationFrame(resolve));
  await new Promise((resolve) => setTimeout(resolve, 0));
}

it("adds a card to each launch dialog that opens, and lets go of it when it closes", async () => {
  const store = vllm();
  const dialog = openDialog(store);
  await settled();
  expect(dialog.querySelectorAll(".xavier-card")).toHaveLength(1);
  dialog.remove();
  await settled();
  expect(store.listeners.size).toBe(0);
});

it("puts a card back that the page has thrown away", async () => {
  const dialog = openDialog(vllm());
  await settled();
  dialog.querySelector(".xavier-card")?.remove();
  await settled();
  expect(dialog.querySelectorAll(".xavier-card")).toHaveLength(1);
});

it.each([
  ["says nothing of its form", () => openDialog(null)],
  ["has no advanced configuration", () => openDialog(vllm(), { collapsible: false })],
  ["keeps parameters in another way", () => openDialog(vllm({ kwargs: { a: 1 } }))],
])("leaves a dialog alone that %s, and says where the console is", async (_, open) => {
  const dialog = open();
  await settled();
  expect(dialog.querySelector(".xavier-card")).toBeNull();
  const notices = dialog.querySelectorAll(".xavier-notice");
  expect(notices).toHaveLength(1);
  expect(notices[0]?.querySelector("a")?.getAttribute("href")).toBe("/xavier");
});

it("has nothing to say in dialogs that launch nothing", async () => {
  const dialog = openDialog(new FakeStore({ key: "spec" }));
  await settled();
  expect(dialog.querySelector(".xavier-card, .xavier-notice")).toBeNull();
});

it("has nothing to say on other pages", async () => {
  at("/running-model");
  const dialog = openDialog(null);
  await settled();
  expect(dialog.querySelector(".xavier-card, .xavier-notice")).toBeNull();
});
