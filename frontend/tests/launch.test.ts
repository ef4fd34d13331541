// SPDX-License-Identifier: Apache-2.0
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { LaunchCard } from "../src/launch";
import { findDialogs } from "../src/page";
import { answerPlans, at, DEFAULTS, json, openDialog, plan, vllm, type FakeStore } from "./support";

let cards: LaunchCard[] = [];

beforeEach(() => {
  vi.useFakeTimers();
  at("/launch-model");
  document.documentElement.lang = "en";
  answerPlans(() => json(plan()));
});

afterEach(() => {
  for (const card of cards) card.dispose();
  cards = [];
  document.body.replaceChildren();
  sessionStorage.clear();
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

function open(store: FakeStore): { root: HTMLElement; card: LaunchCard } {
  const root = openDialog(store);
  const [dialog] = findDialogs(document).dialogs;
  if (!dialog) throw new Error("no dialog was found");
  const card = new LaunchCard(dialog, DEFAULTS);
  cards.push(card);
  return { root, card };
}

function one(root: HTMLElement, selector: string): HTMLElement {
  const found = root.querySelector<HTMLElement>(selector);
  if (!found) throw new Error(`no ${selector}`);
  return found;
}

const toggle = (root: HTMLElement): HTMLElement => one(root, '[role="switch"]');
const deploy = (root: HTMLElement): HTMLButtonElement =>
  one(root, 'button[type="submit"]') as HTMLButtonElement;
const gpu = (root: HTMLElement): HTMLInputElement =>
  one(root, 'input[type="number"]') as HTMLInputElement;

function enter(input: HTMLInputElement | HTMLSelectElement, value: string): void {
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.dispatchEvent(new Event("change", { bubbles: true }));
}

async function answered(): Promise<void> {
  await vi.advanceTimersByTimeAsync(300);
}

describe("the card", () => {
  it("stands before the advanced configuration, turned off", () => {
    const { root } = open(vllm());
    const card = one(root, ".xavier-card");
    expect(card.nextElementSibling?.textContent).toBe("Advanced");
    expect(card.hidden).toBe(false);
    expect(toggle(root).getAttribute("aria-checked")).toBe("false");
  });

  it.each([{ model_engine: "Transformers" }, { model_engine: "" }, { model_type: "embedding" }])(
    "is hidden for %j",
    (values) => {
      const { root } = open(vllm(values));
      expect(one(root, ".xavier-card").hidden).toBe(true);
    },
  );

  it("puts its settings into the form and takes them out again", () => {
    const store = vllm({ kwargs: [{ key: "max_num_seqs", value: "8" }] });
    const { root } = open(store);
    toggle(root).click();
    enter(gpu(root), "64");
    expect(store.parameter("xavier_gpu_cache_bytes")).toBe("64MiB");
    expect(store.parameter("xavier_gpu_first")).toBe("true");
    expect(store.edits).toBe(2);
    toggle(root).click();
    expect(store.values.kwargs).toEqual([{ key: "max_num_seqs", value: "8" }]);
    toggle(root).click();
    expect(store.parameter("xavier_gpu_cache_bytes")).toBe("64MiB");
  });

  it("keeps its unit whatever is typed", () => {
    const store = vllm();
    const { root } = open(store);
    toggle(root).click();
    enter(gpu(root), "1e3");
    expect(store.parameter("xavier_gpu_cache_bytes")).toBe("MiB");
    expect(deploy(root).disabled).toBe(true);
    enter(gpu(root), "1.5");
    expect(store.parameter("xavier_gpu_cache_bytes")).toBe("1.5MiB");
  });

  it("shows what the page fills in", async () => {
    const store = vllm();
    const { root } = open(store);
    store.setFieldsValue({
      kwargs: [
        { key: "xavier_gpu_first", value: "true" },
        { key: "xavier_gpu_cache_bytes", value: "1536MiB" },
        { key: "xavier_transport", value: "shm" },
      ],
    });
    await answered();
    expect(toggle(root).getAttribute("aria-checked")).toBe("true");
    expect(gpu(root).value).toBe("1536");
    expect((one(root, "select[id$=transport]") as HTMLSelectElement).value).toBe("shm");
  });

  it("takes its settings away from another engine and brings them back", async () => {
    const store = vllm();
    const { root } = open(store);
    toggle(root).click();
    enter(gpu(root), "64");
    store.setFieldValue("model_engine", "Transformers");
    await answered();
    expect(store.values.kwargs).toEqual([]);
    store.setFieldValue("model_engine", "vLLM");
    await answered();
    expect(store.parameter("xavier_gpu_cache_bytes")).toBe("64MiB");
  });

  it("does not bring them back into a form that was filled anew", async () => {
    const store = vllm();
    const { root } = open(store);
    toggle(root).click();
    store.setFieldValue("model_engine", "Transformers");
    await answered();
    store.setFieldsValue({ model_engine: "", kwargs: [] });
    await answered();
    store.setFieldValue("model_engine", "vLLM");
    await answered();
    expect(store.values.kwargs).toEqual([]);
    expect(toggle(root).getAttribute("aria-checked")).toBe("false");
  });

  it("goes where the page has moved its own parts", () => {
    const { root, card } = open(vllm());
    const advanced = one(root, ".col-span-2");
    advanced.before(document.createElement("div"));
    card.refresh();
    expect(advanced.previousElementSibling?.className).toBe("xavier-card");
    expect(root.querySelectorAll(".xavier-card")).toHaveLength(1);
  });

  it("speaks the page's language and changes with it", () => {
    const { root, card } = open(vllm());
    toggle(root).click();
    document.documentElement.lang = "zh";
    card.refresh();
    expect(one(root, ".xavier-title").textContent).toContain("共享 KV 缓存");
    expect(toggle(root).getAttribute("aria-checked")).toBe("true");
  });

  it("leaves nothing behind", () => {
    const store = vllm();
    const { root, card } = open(store);
    toggle(root).click();
    enter(gpu(root), "");
    card.dispose();
    expect(root.querySelector(".xavier-card")).toBeNull();
    expect(deploy(root).disabled).toBe(false);
    expect(store.listeners.size).toBe(0);
  });
});

describe("the plan", () => {
  it("is told per replica and in all", async () => {
    const { root } = open(vllm({ replica: "2" }));
    toggle(root).click();
    await answered();
    const text = one(root, ".xavier-plan").textContent;
    expect(text).toContain("1,365 blocks = 21,840 tokens on the GPU");
    expect(text).toContain("All 2 replicas");
    expect(text).toContain("2,730 blocks = 43,680 tokens on the GPU");
  });

  it("is asked for with what the launch would send, and nothing secret", async () => {
    const asked = answerPlans(() => json(plan()));
    const { root } = open(
      vllm({
        replica: "2",
        n_gpu: "CPU",
        gpu_idx: "0,1",
        envs: [{ key: "HF_TOKEN", value: "x" }],
        kwargs: [{ key: "block_size", value: "16" }],
      }),
    );
    toggle(root).click();
    await answered();
    expect(asked).toHaveLength(1);
    expect(asked[0]).toMatchObject({
      model_name: "m",
      replica: 2,
      n_gpu: null,
      gpu_idx: [0, 1],
      block_size: "16",
      xavier_gpu_cache_bytes: "256MiB",
    });
    expect(asked[0]).not.toHaveProperty("envs");
  });

  it("is asked for once while a number is typed", async () => {
    const asked = answerPlans(() => json(plan()));
    const { root } = open(vllm());
    toggle(root).click();
    for (const text of ["6", "64", "641"]) enter(gpu(root), text);
    await answered();
    expect(asked.map((body) => body.xavier_gpu_cache_bytes)).toEqual(["641MiB"]);
  });

  it("does not mind an answer that comes too late", async () => {
    const answers: ((response: Response) => void)[] = [];
    answerPlans(() => new Promise((resolve) => answers.push(resolve)));
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    enter(gpu(root), "64");
    await answered();
    answers[1]?.(json(plan({ replica: 1 })));
    answers[0]?.(json(plan({ replica: 7 })));
    await answered();
    expect(one(root, ".xavier-plan").textContent).not.toContain("All 7");
    expect(one(root, ".xavier-plan").textContent).toContain("Each replica");
  });

  it("carries the visitor's token", async () => {
    const headers: unknown[] = [];
    vi.stubGlobal("fetch", (_: string, init: RequestInit) => {
      headers.push(init.headers);
      return Promise.resolve(json(plan()));
    });
    sessionStorage.setItem("token", "abc");
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    expect(headers).toEqual([
      { "Content-Type": "application/json", Authorization: "Bearer abc" },
    ]);
  });

  it.each([
    ["a refusal", () => json({ detail: "Not enough permissions" }, 403), "Not enough permissions"],
    ["no server", () => Promise.reject(new Error("offline")), "offline"],
    ["a page instead", () => new Response("<html>", { status: 502 }), "does not tell"],
  ])("that is not to be had (%s) blocks nothing", async (_, answer, said) => {
    answerPlans(answer);
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    expect(one(root, ".xavier-plan").textContent).toContain(said);
    expect(deploy(root).disabled).toBe(false);
  });

  it("shows bytes where the block is not known", async () => {
    const unknown = { budget_bytes: 2 ** 28, blocks: null, tokens: null };
    const tiers = { gpu: unknown, cpu: unknown };
    const model = { reason: "not downloaded yet" };
    answerPlans(() => json(plan({ per_replica: tiers, total: tiers, model })));
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    const text = one(root, ".xavier-plan").textContent;
    expect(text).toContain("256 MiB on the GPU");
    expect(text).toContain("not downloaded yet");
  });

  it("shows warnings in the page's language", async () => {
    const warnings = [{ field: "replica", code: "offload_only", message: "replica=1 means offload" }];
    answerPlans(() => json(plan({ warnings })));
    document.documentElement.lang = "zh-TW";
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    expect(one(root, ".xavier-warnings").textContent).toContain("只有一个副本");
    expect(deploy(root).disabled).toBe(false);
  });
});

describe("the button that deploys", () => {
  it("is disabled with the reason at once when a budget is no size", () => {
    const { root } = open(vllm());
    toggle(root).click();
    enter(gpu(root), "-1");
    expect(deploy(root).disabled).toBe(true);
    expect(deploy(root).title).toContain("GPU cache budget is not a size");
    expect(gpu(root).getAttribute("aria-invalid")).toBe("true");
    enter(gpu(root), "64");
    expect(deploy(root).disabled).toBe(false);
    expect(deploy(root).hasAttribute("title")).toBe(false);
  });

  it("is disabled with the server's reason, and enabled when turned off", async () => {
    const message = "xavier_gpu_cache_bytes=9TiB: at most 8 GiB fit";
    const errors = [{ field: "xavier_gpu_cache_bytes", code: "does_not_fit", message }];
    answerPlans(() => json(plan({ valid: false, errors })));
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    expect(deploy(root).disabled).toBe(true);
    const described = deploy(root).getAttribute("aria-describedby") ?? "";
    expect(document.getElementById(described)?.textContent).toBe(`Cannot deploy: ${message}`);
    expect(one(root, '.xavier-field [id$="gpu-error"]').textContent).toBe(
      "Does not fit: at most 8 GiB.",
    );
    toggle(root).click();
    expect(deploy(root).disabled).toBe(false);
  });

  it("is told apart from other findings of the same plan", async () => {
    const errors = [{ field: "enable_lora", code: "unsupported", message: "LoRA is not supported" }];
    answerPlans(() => json(plan({ valid: false, errors })));
    const { root } = open(vllm());
    toggle(root).click();
    await answered();
    expect(one(root, '[role="alert"]').textContent).toBe("Cannot deploy: LoRA is not supported");
    expect(gpu(root).getAttribute("aria-invalid")).toBe("false");
  });
});
