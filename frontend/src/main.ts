// SPDX-License-Identifier: Apache-2.0
// Adds the card to each launch dialog that opens, as long as the page lives.

import { consoleLink } from "./card";
import { h } from "./dom";
import { LaunchCard } from "./launch";
import { findDialogs, language } from "./page";
import type { Defaults } from "./settings";
import styles from "./style.css?inline";
import { texts } from "./texts";

const NOTICE = "xavier-notice";
const STYLES = "xavier-styles";

function start(defaults: Defaults): void {
  let cards: LaunchCard[] = [];

  const look = (): void => {
    const { dialogs, strange } = findDialogs(document);
    const forms = new Set(dialogs.map((dialog) => dialog.form));
    for (const card of cards) if (!forms.has(card.form)) card.dispose();
    cards = cards.filter((card) => forms.has(card.form));
    for (const dialog of dialogs) {
      const card = cards.find((known) => known.form === dialog.form);
      if (card) card.refresh();
      else cards.push(new LaunchCard(dialog, defaults));
    }
    for (const root of strange) addNotice(root, defaults);
    if (dialogs.length + strange.length > 0) addStyles();
  };

  let queued = false;
  const observer = new MutationObserver(() => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      look();
    });
  });
  observer.observe(document.documentElement, {
    childList: true,
    subtree: true,
    attributeFilter: ["lang"],
  });
  look();
}

/** Only once there is something to show: before, the page may still be taking over its HTML. */
function addStyles(): void {
  if (!document.getElementById(STYLES)) document.head.append(h("style", { id: STYLES }, styles));
}

/** Say, in a dialog that is not built as expected, how to launch without the card. */
function addNotice(root: HTMLElement, defaults: Defaults): void {
  if (root.querySelector(`.${NOTICE}`)) return;
  const say = texts(language(document));
  const notice = h("p", { class: `${NOTICE} xavier-help`, role: "note" }, say.strange);
  if (defaults.console !== null) notice.append(" ", consoleLink(defaults.console, say));
  root.append(notice);
}

const script = document.querySelector<HTMLElement>("script[data-xavier]");
const told = script?.dataset.xavier;
if (told) start(JSON.parse(told) as Defaults);
