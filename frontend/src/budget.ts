// SPDX-License-Identifier: Apache-2.0
// One budget of the card: a number, its unit, and a slider over what there is.

import { h } from "./dom";
import {
  friendly,
  inUnit,
  isShare,
  isSize,
  shown,
  stopOf,
  stops,
  toBytes,
  UNITS,
  UNKNOWN_LIMIT,
  type Amount,
} from "./sizes";
import type { Texts } from "./texts";

export class BudgetField {
  readonly element: HTMLElement;
  amount: Amount = { number: "", unit: UNITS[0] };
  private readonly number: HTMLInputElement;
  private readonly unit: HTMLSelectElement;
  private readonly slider: HTMLInputElement;
  private readonly error: HTMLElement;
  private stops = stops(UNKNOWN_LIMIT);
  private resolved: number | null = null;

  constructor(
    id: string,
    label: string,
    help: string,
    private readonly say: Texts,
    private readonly language: string,
    private readonly changed: () => void,
  ) {
    this.number = h("input", {
      id,
      type: "number",
      min: "0",
      step: "any",
      inputmode: "decimal",
      class: "xavier-input",
      "aria-describedby": `${id}-help ${id}-error`,
    });
    this.unit = h("select", { class: "xavier-input", "aria-label": say.unit(label) });
    for (const unit of UNITS) this.unit.append(h("option", { value: unit }, unit));
    this.slider = h("input", {
      type: "range",
      min: "0",
      class: "xavier-slider",
      "aria-label": say.slider(label),
    });
    this.error = h("p", { id: `${id}-error`, class: "xavier-error" });
    this.number.addEventListener("input", () => {
      // The browser takes 1e3 for a number, the server does not.
      const plain = /^-?[\d.]*$/.test(this.number.value);
      this.set({ ...this.amount, number: plain ? this.number.value : "" });
    });
    this.unit.addEventListener("change", () => {
      this.set(inUnit(this.amount, this.unit.value, this.resolved));
    });
    this.slider.addEventListener("input", () => {
      this.set(this.atSlider());
    });
    this.element = h(
      "div",
      { class: "xavier-field" },
      h("label", { for: id, class: "xavier-label" }, label),
      h("div", { class: "xavier-row" }, this.number, this.unit),
      this.slider,
      h("p", { id: `${id}-help`, class: "xavier-help" }, help),
      this.error,
    );
  }

  /** Show an amount; a number that is being typed is left alone. */
  show(amount: Amount): void {
    this.amount = amount;
    if (document.activeElement !== this.number) this.number.value = amount.number;
    if (![...this.unit.options].some((option) => option.value === amount.unit)) {
      this.unit.append(h("option", { value: amount.unit }, amount.unit));
    }
    this.unit.value = amount.unit;
    this.showSlider();
  }

  /** Take over what the server knows: the largest budget, and the bytes of a share. */
  limits(most: number | null, resolved: number | null): void {
    // Where nothing fits any more, a slider with no way to go would show nothing.
    if (most !== 0) this.stops = stops(most ?? UNKNOWN_LIMIT);
    this.resolved = resolved;
    this.showSlider();
  }

  /**
   * Show what is wrong: what the server found, or "" for nothing. Return whether the server need not
   * be asked, since this is no size at all.
   */
  problem(found: string): boolean {
    const unreadable = !isSize(this.amount);
    const text = unreadable ? this.say.notASize : found;
    if (this.error.textContent !== text) this.error.textContent = text;
    this.number.setAttribute("aria-invalid", String(text !== ""));
    return unreadable;
  }

  private set(amount: Amount): void {
    this.amount = amount;
    this.changed();
  }

  private atSlider(): Amount {
    const position = Number(this.slider.value);
    if (isShare(this.amount)) return { number: String(position), unit: "%" };
    return friendly(this.stops[position] ?? 0);
  }

  private showSlider(): void {
    const bytes = toBytes(this.amount);
    const percent = Number(this.amount.number);
    const share = isShare(this.amount);
    this.slider.max = String(share ? 100 : this.stops.length - 1);
    const position = share ? percent || 0 : stopOf(bytes ?? 0, this.stops);
    this.slider.value = String(position);
    const text = share ? this.say.share(this.amount.number) : shown(bytes ?? 0, this.language);
    this.slider.setAttribute("aria-valuetext", text);
    const filled = (100 * position) / Math.max(1, Number(this.slider.max));
    this.slider.style.setProperty("--filled", `${Math.min(100, filled)}%`);
  }
}
