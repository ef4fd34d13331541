// SPDX-License-Identifier: Apache-2.0
// A page with the structure that is known of the stock one, and a planner that answers as told.

import { vi } from "vitest";

import type { Plan } from "../src/plan";
import type { Defaults } from "../src/settings";

export const DEFAULTS: Defaults = {
  gpu: 268435456,
  cpu: "10%",
  transport: "auto",
  transports: ["auto", "shm", "nixl", "xoscar"],
  console: "/xavier",
};

type Values = Record<string, unknown>;

export class FakeStore {
  edits = 0;
  listeners = new Set<() => void>();

  constructor(public values: Values) {}

  getFieldValue(name: string): unknown {
    return this.values[name];
  }

  getFieldsValue(): Values {
    return this.values;
  }

  setFieldValue(name: string, value: unknown): void {
    this.setFieldsValue({ [name]: value });
  }

  setFieldsValue(values: Values): void {
    this.values = { ...this.values, ...values };
    for (const listener of this.listeners) listener();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** The value of an additional parameter. */
  parameter(key: string): unknown {
    const rows = (this.values.kwargs ?? []) as { key: string; value: unknown }[];
    return rows.find((row) => row.key === key)?.value;
  }
}

export function vllm(values: Values = {}): FakeStore {
  return new FakeStore({ model_name: "m", model_type: "LLM", model_engine: "vLLM", ...values });
}

/** Open a dialog like the stock one; `store` null is a form that React says nothing about. */
export function openDialog(store: FakeStore | null, { collapsible = true } = {}): HTMLElement {
  const dialog = document.createElement("div");
  dialog.setAttribute("role", "dialog");
  const advanced = '<div class="col-span-2"><div data-slot="collapsible">Advanced</div></div>';
  dialog.innerHTML =
    `<div data-slot="dialog-body"><form id="f"><div>Model UID</div>` +
    `${collapsible ? advanced : ""}</form></div>` +
    `<div data-slot="dialog-footer"><button type="submit" form="f">Deploy</button></div>`;
  const form = dialog.querySelector("form");
  if (form && store) {
    const edited = (): void => {
      store.edits++;
    };
    const component = { memoizedProps: { form: store, onUserChange: edited }, return: null };
    const fiber = { memoizedProps: { className: "grid" }, return: component };
    Object.assign(form, { __reactFiber$abc: fiber });
  }
  document.body.append(dialog);
  return dialog;
}

export function at(path: string): void {
  window.history.replaceState(null, "", path);
}

export function plan(changes: Partial<Plan> = {}): Plan {
  const tier = (blocks: number): Plan["total"]["gpu"] => ({
    budget_bytes: blocks * 196608,
    blocks,
    tokens: blocks * 16,
  });
  return {
    valid: true,
    errors: [],
    warnings: [],
    model: { reason: null },
    replica: 2,
    device: "cuda",
    per_replica: { gpu: tier(1365), cpu: tier(20000) },
    total: { gpu: tier(2730), cpu: tier(40000) },
    limits: { gpu_bytes: 8 * 2 ** 30, cpu_bytes: null },
    ...changes,
  };
}

/** Let the planner's server answer; returns the bodies that it was asked with. */
export function answerPlans(answer: () => Response | Promise<Response>): Values[] {
  const asked: Values[] = [];
  vi.stubGlobal("fetch", (_: string, init: RequestInit) => {
    asked.push(JSON.parse(init.body as string) as Values);
    return Promise.resolve(answer());
  });
  return asked;
}

export function json(content: unknown, status = 200): Response {
  return new Response(JSON.stringify(content), { status });
}
