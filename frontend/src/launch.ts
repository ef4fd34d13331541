// SPDX-License-Identifier: Apache-2.0
// One launch dialog with its card: the page's form is the truth, and the card shows and changes it.

import { Card } from "./card";
import {
  anchor,
  deployButton,
  getRows,
  language,
  launchBody,
  setRows,
  usesVllm,
  type LaunchDialog,
} from "./page";
import { Planner } from "./plan";
import { initial, read, write, type Defaults, type Settings } from "./settings";
import { texts } from "./texts";

const BLOCKED = "data-xavier-blocked";

export class LaunchCard {
  private card: Card;
  private readonly planner = new Planner(() => {
    this.show();
  });
  private readonly unsubscribe: () => void;
  private queued = false;
  /** What the switch brings back. */
  private latest: Settings;
  /** Set while another engine is chosen: the settings to go on with once it is vLLM again. */
  private suspended: Settings | null = null;

  constructor(
    private readonly dialog: LaunchDialog,
    private readonly defaults: Defaults,
  ) {
    this.latest = initial(defaults);
    this.card = this.makeCard();
    this.unsubscribe = dialog.store.subscribe(() => {
      this.queue();
    });
    this.refresh();
  }

  get form(): HTMLFormElement {
    return this.dialog.form;
  }

  /** Put the card where it belongs, in the page's language; the page may have moved its own parts. */
  refresh(): void {
    const tag = language(document);
    if (this.card.language !== tag) {
      this.card.element.remove();
      this.card = this.makeCard();
    }
    const next = anchor(this.form);
    if (next && next.previousElementSibling !== this.card.element) next.before(this.card.element);
    this.sync();
  }

  dispose(): void {
    this.unsubscribe();
    this.planner.stop();
    this.card.element.remove();
    this.block(null);
  }

  private makeCard(): Card {
    const tag = language(document);
    return new Card(texts(tag), tag, this.defaults, {
      toggled: (on) => {
        this.change(on ? this.latest : null);
      },
      changed: (settings) => {
        this.change(settings);
      },
    });
  }

  private change(settings: Settings | null): void {
    setRows(this.dialog, write(getRows(this.dialog.store), settings));
    this.sync();
  }

  /** Follow the form once it is at rest: it tells of each of several changes in a row. */
  private queue(): void {
    if (this.queued) return;
    this.queued = true;
    queueMicrotask(() => {
      this.queued = false;
      if (this.form.isConnected) this.sync();
    });
  }

  private sync(): void {
    const { store } = this.dialog;
    const vllm = usesVllm(store);
    const settings = read(getRows(store), this.defaults);
    if (settings) this.latest = settings;
    if (vllm === null) this.suspended = null;
    if (vllm === false && settings) {
      this.suspended = settings;
      setRows(this.dialog, write(getRows(store), null));
    }
    if (vllm && this.suspended) {
      const resumed = settings ?? this.suspended;
      this.suspended = null;
      setRows(this.dialog, write(getRows(store), resumed));
    }
    this.show();
  }

  private show(): void {
    const vllm = usesVllm(this.dialog.store) === true;
    const settings = vllm ? read(getRows(this.dialog.store), this.defaults) : null;
    this.card.element.hidden = !vllm;
    this.card.showSettings(settings);
    if (settings) {
      this.planner.ask(launchBody(this.dialog.store));
      this.block(this.card.showOutcome(this.planner.outcome));
    } else {
      this.planner.stop();
      this.block(null);
    }
  }

  /** Disable the button that launches, with the reason; null leaves it to the page again. */
  private block(reason: string | null): void {
    const button = deployButton(this.dialog);
    if (!button || (reason === null && !button.hasAttribute(BLOCKED))) return;
    button.disabled = reason !== null;
    button.toggleAttribute(BLOCKED, reason !== null);
    if (reason === null) {
      button.removeAttribute("title");
      button.removeAttribute("aria-describedby");
    } else {
      button.title = reason;
      button.setAttribute("aria-describedby", this.card.problemsId);
    }
  }
}
