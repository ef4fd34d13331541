// SPDX-License-Identifier: Apache-2.0
// The card itself: elements that show settings and an outcome, and tell what a person changed.

import { BudgetField } from "./budget";
import { h } from "./dom";
import type { Finding, Outcome, Plan } from "./plan";
import { CPU, GPU, TRANSPORT, type Defaults, type Settings } from "./settings";
import type { Texts } from "./texts";

export interface CardEvents {
  /** The switch was used. */
  toggled: (on: boolean) => void;
  /** A value was changed; the switch is on. */
  changed: (settings: Settings) => void;
}

let made = 0;

export class Card {
  readonly element: HTMLElement;
  /** The reasons why the launch is blocked, for the button to point to. */
  readonly problemsId: string;
  private readonly toggle: HTMLButtonElement;
  private readonly body: HTMLElement;
  private readonly gpu: BudgetField;
  private readonly cpu: BudgetField;
  private readonly transport: HTMLSelectElement;
  private readonly transportError: HTMLElement;
  private readonly plan: HTMLElement;
  private readonly warnings: HTMLElement;
  private readonly problems: HTMLElement;

  constructor(
    private readonly say: Texts,
    private readonly tag: string,
    defaults: Defaults,
    events: CardEvents,
  ) {
    const id = `xavier-${++made}`;
    this.problemsId = `${id}-problems`;
    const changed = (): void => {
      events.changed({
        gpu: this.gpu.amount,
        cpu: this.cpu.amount,
        transport: this.transport.value,
      });
    };
    this.toggle = h("button", {
      type: "button",
      role: "switch",
      class: "xavier-switch",
      "aria-label": say.on,
      "aria-describedby": `${id}-about`,
      "aria-controls": `${id}-body`,
    });
    this.toggle.append(h("span", { class: "xavier-thumb" }));
    this.toggle.addEventListener("click", () => {
      events.toggled(this.toggle.getAttribute("aria-checked") !== "true");
    });
    this.gpu = new BudgetField(`${id}-gpu`, say.gpu, say.gpuHelp, say, tag, changed);
    this.cpu = new BudgetField(`${id}-cpu`, say.cpu, say.cpuHelp, say, tag, changed);
    this.transport = h("select", {
      id: `${id}-transport`,
      class: "xavier-input",
      "aria-describedby": `${id}-transport-help ${id}-transport-error`,
    });
    for (const name of defaults.transports) {
      this.transport.append(h("option", { value: name }, name === "auto" ? say.automatic : name));
    }
    this.transport.addEventListener("change", changed);
    this.transportError = h("p", { id: `${id}-transport-error`, class: "xavier-error" });
    this.plan = h("div", { class: "xavier-plan", role: "status", "aria-live": "polite" });
    this.warnings = h("ul", { class: "xavier-warnings" });
    this.problems = h("div", { id: this.problemsId, class: "xavier-error", role: "alert" });
    this.body = h(
      "div",
      { id: `${id}-body`, class: "xavier-body" },
      this.gpu.element,
      this.cpu.element,
      h(
        "div",
        { class: "xavier-field" },
        h("label", { for: `${id}-transport`, class: "xavier-label" }, say.transport),
        this.transport,
        h("p", { id: `${id}-transport-help`, class: "xavier-help" }, say.transportHelp),
        this.transportError,
      ),
      h("div", { class: "xavier-wide" }, this.plan, this.warnings, this.problems),
    );
    const title = h("span", { id: `${id}-title`, class: "xavier-title" }, say.title);
    const about = h("span", { id: `${id}-about`, class: "xavier-help" }, say.about);
    const link = defaults.console === null ? [] : [" ", consoleLink(defaults.console, say)];
    this.element = h(
      "div",
      { class: "xavier-card", role: "group", "aria-labelledby": `${id}-title` },
      h("div", { class: "xavier-head" }, h("span", {}, title, about, ...link), this.toggle),
      this.body,
    );
  }

  /** Show settings; null is the switch turned off. */
  showSettings(settings: Settings | null): void {
    this.toggle.setAttribute("aria-checked", String(settings !== null));
    this.body.hidden = settings === null;
    if (settings === null) return;
    this.gpu.show(settings.gpu);
    this.cpu.show(settings.cpu);
    // A value that this page does not offer stays what it is until another one is chosen.
    if (![...this.transport.options].some((option) => option.value === settings.transport)) {
      this.transport.append(h("option", { value: settings.transport }, settings.transport));
    }
    this.transport.value = settings.transport;
  }

  /** Show what the server said, and return why the launch is blocked, or null. */
  showOutcome(outcome: Outcome): string | null {
    const plan = outcome.state === "planned" ? outcome.plan : null;
    this.gpu.limits(plan?.limits.gpu_bytes ?? null, plan?.per_replica.gpu.budget_bytes ?? null);
    this.cpu.limits(plan?.limits.cpu_bytes ?? null, plan?.per_replica.cpu.budget_bytes ?? null);
    const errors = plan === null || plan.valid ? [] : plan.errors;
    const short = (field: string, most: number | null): string => {
      const found = errors.find((error) => error.field === field);
      return found ? this.say.short(found, most) : "";
    };
    const unreadable = new Map<string, string>();
    const budgets = [
      { field: GPU, shown: this.gpu, name: this.say.gpu, most: plan?.limits.gpu_bytes ?? null },
      { field: CPU, shown: this.cpu, name: this.say.cpu, most: plan?.limits.cpu_bytes ?? null },
    ];
    for (const { field, shown, name, most } of budgets) {
      if (shown.problem(short(field, most))) unreadable.set(field, this.say.unreadable(name));
    }
    const transport = short(TRANSPORT, null);
    replaceText(this.transportError, transport);
    this.transport.setAttribute("aria-invalid", String(transport !== ""));
    const others = errors.filter((error) => !unreadable.has(error.field));
    const told = [...unreadable.values(), ...others.map((error) => this.text(error, plan))];
    const reasons = [...new Set(told)];
    const reason = reasons.length === 0 ? null : this.say.blocked(reasons);
    replaceText(this.problems, reason ?? "");
    this.showPlan(outcome, reason !== null);
    return reason;
  }

  private showPlan(outcome: Outcome, blocked: boolean): void {
    const warnings = outcome.state === "planned" ? outcome.plan.warnings : [];
    const plan = outcome.state === "planned" ? outcome.plan : null;
    replace(this.warnings, warnings.map((item) => h("li", {}, this.text(item, plan))));
    this.plan.hidden = blocked;
    if (outcome.state === "waiting") replaceText(this.plan, this.say.planning);
    if (outcome.state === "failed") replaceText(this.plan, this.say.noPlan(outcome.reason));
    if (plan !== null) replace(this.plan, this.planLines(plan));
  }

  private planLines(plan: Plan): Node[] {
    const line = (label: string, tiers: Plan["total"]): Node[] => {
      const parts = (["gpu", "cpu"] as const).map((name) =>
        h("span", {}, this.say.tier(tiers[name], name, plan.device)),
      );
      return [h("dt", {}, label), h("dd", {}, ...parts)];
    };
    const lines = h("dl", {}, ...line(this.say.each, plan.per_replica));
    if (plan.replica > 1) lines.append(...line(this.say.all(plan.replica), plan.total));
    const unknown = plan.per_replica.gpu.blocks === null && plan.model.reason !== null;
    const note = unknown ? [h("p", {}, this.say.unknownBlocks(plan.model.reason ?? ""))] : [];
    return [h("p", { class: "xavier-label" }, this.say.plan), lines, ...note];
  }

  private text(finding: Finding, plan: Plan | null): string {
    return plan === null ? finding.message : this.say.finding(finding, plan);
  }

  /** The language that the card was made for. */
  get language(): string {
    return this.tag;
  }
}

export function consoleLink(address: string, say: Texts): HTMLAnchorElement {
  // The console takes the visitor's login from the page that it was opened from.
  const attributes = { href: address, target: "_blank", rel: "opener", class: "xavier-link" };
  return h("a", attributes, say.console);
}

/** Change a live region only where it says something else, so that nothing is read twice. */
function replaceText(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

function replace(element: HTMLElement, children: Node[]): void {
  const next = h("div", {}, ...children);
  if (element.innerHTML !== next.innerHTML) element.replaceChildren(...next.childNodes);
}
