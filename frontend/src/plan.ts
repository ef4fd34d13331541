// SPDX-License-Identifier: Apache-2.0
// Asks the server's planner, without asking too often and without minding late answers.

import { token } from "./page";

const URL = "/v1/xavier/plan";
const PAUSE_MS = 250;
const TIMEOUT_MS = 10_000;

export interface TierPlan {
  budget_bytes: number | null;
  blocks: number | null;
  tokens: number | null;
}

interface Tiers {
  gpu: TierPlan;
  cpu: TierPlan;
}

/** A finding; `field` is the launch option or argument that it is about. */
export interface Finding {
  field: string;
  code: string;
  message: string;
}

/** The server's answer, as far as the card shows it. */
export interface Plan {
  valid: boolean;
  errors: Finding[];
  warnings: Finding[];
  model: { reason: string | null };
  replica: number;
  device: string | null;
  per_replica: Tiers;
  total: Tiers;
  limits: { gpu_bytes: number | null; cpu_bytes: number | null };
}

/** What is known of the launch that the form describes now. */
export type Outcome =
  | { state: "waiting" }
  | { state: "planned"; plan: Plan }
  | { state: "failed"; reason: string };

/** Keeps one outcome up to date with the latest body that it was given. */
export class Planner {
  outcome: Outcome = { state: "waiting" };
  private asked = "";
  private timer: ReturnType<typeof setTimeout> | undefined;
  private request: AbortController | undefined;

  /** `changed` is called after each new outcome. */
  constructor(private readonly changed: () => void) {}

  /** Plan this body, if it is another one than before. The outcome stays until the answer comes. */
  ask(body: Record<string, unknown>): void {
    const text = JSON.stringify(body);
    if (text === this.asked) return;
    this.stop();
    this.asked = text;
    this.timer = setTimeout(() => void this.fetch(text), PAUSE_MS);
  }

  /** Forget everything: nothing that is under way is heard of again. */
  stop(): void {
    clearTimeout(this.timer);
    this.request?.abort();
    this.asked = "";
  }

  private async fetch(body: string): Promise<void> {
    const request = new AbortController();
    this.request = request;
    const outcome = await plan(body, request.signal);
    if (request.signal.aborted) return;
    this.outcome = outcome;
    this.changed();
  }
}

async function plan(body: string, signal: AbortSignal): Promise<Outcome> {
  const headers: Record<string, string> = { "Content-Type": "application/json" };
  const own = token();
  if (own !== null) headers.Authorization = `Bearer ${own}`;
  const signals = AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]);
  try {
    const answer = await fetch(URL, { method: "POST", headers, body, signal: signals });
    const content = (await answer.json()) as unknown;
    if (answer.ok) return { state: "planned", plan: content as Plan };
    return { state: "failed", reason: `${answer.status}: ${detail(content)}` };
  } catch (error) {
    return { state: "failed", reason: error instanceof Error ? error.message : String(error) };
  }
}

function detail(content: unknown): string {
  const found: unknown = content instanceof Object ? Reflect.get(content, "detail") : undefined;
  return typeof found === "string" ? found : JSON.stringify(found ?? content);
}
