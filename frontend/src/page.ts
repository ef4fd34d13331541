// SPDX-License-Identifier: Apache-2.0
// What is known of the stock page: where its launch dialog is, and how to reach that dialog's form.
//
// Nothing else in this folder knows the page's structure. What is not found as expected makes a
// dialog "strange", and then it is left as it is.

import { isRow } from "./settings";

/** The store behind the page's forms, as far as it is used here. */
export interface FormStore {
  getFieldValue(name: string): unknown;
  getFieldsValue(): Record<string, unknown>;
  setFieldValue(name: string, value: unknown): void;
  /** Call back after each change; returns how to stop that. */
  subscribe(listener: () => void): () => void;
}

export interface LaunchDialog {
  root: HTMLElement;
  form: HTMLFormElement;
  store: FormStore;
  /** Tells the page that a person changed something, so that it fills in nothing over it. */
  edited: () => void;
}

export interface Found {
  dialogs: LaunchDialog[];
  /** Launch dialogs that are not built as expected. */
  strange: HTMLElement[];
}

const ROUTE = /^\/launch-model(\/|$)/;
const ROWS = "kwargs";
const TOKEN = "token";
const NO_TOKEN = "no_auth";
const NEAR = 12;

/** Find the launch dialogs that are open. */
export function findDialogs(page: Document): Found {
  const found: Found = { dialogs: [], strange: [] };
  if (!ROUTE.test(page.location.pathname)) return found;
  for (const form of page.querySelectorAll<HTMLFormElement>('[role="dialog"] form')) {
    const root = form.closest<HTMLElement>('[role="dialog"]');
    if (!root) continue;
    const props = formProps(form);
    // Other dialogs of this page have forms, too: of what launches nothing there is no engine.
    if (props && props.form.getFieldValue("model_type") === undefined) continue;
    const complete = props !== null && anchor(form) !== null && hasRows(props.form);
    if (complete) found.dialogs.push({ root, form, store: props.form, edited: props.edited });
    else found.strange.push(root);
  }
  return found;
}

/** Return the cell of the form's grid that holds "Advanced Configuration", or null. */
export function anchor(form: HTMLFormElement): HTMLElement | null {
  let cell = [...form.querySelectorAll<HTMLElement>('[data-slot="collapsible"]')].at(-1) ?? null;
  while (cell && cell.parentElement !== form) cell = cell.parentElement;
  return cell;
}

/** Return the button that submits the form; it is outside of it, and not there all the time. */
export function deployButton(dialog: LaunchDialog): HTMLButtonElement | null {
  const own = [...dialog.root.querySelectorAll<HTMLButtonElement>('button[type="submit"]')];
  return own.find((button) => button.form === dialog.form) ?? null;
}

/** Tell whether the dialog launches a language model with vLLM; null as long as no engine is chosen. */
export function usesVllm(store: FormStore): boolean | null {
  const engine = store.getFieldValue("model_engine");
  if (typeof engine !== "string" || engine === "") return null;
  return engine.toLowerCase() === "vllm" && store.getFieldValue("model_type") === "LLM";
}

/** Return the engine's additional parameters. */
export function getRows(store: FormStore): unknown[] {
  const rows = store.getFieldValue(ROWS);
  return Array.isArray(rows) ? rows : [];
}

export function setRows(dialog: LaunchDialog, rows: unknown[]): void {
  dialog.edited();
  dialog.store.setFieldValue(ROWS, rows);
}

/** Return the form's values as a launch would send them, without what may be secret. */
export function launchBody(store: FormStore): Record<string, unknown> {
  const values = { ...store.getFieldsValue() };
  const rows = getRows(store).filter(isRow);
  for (const name of [ROWS, "envs", "replica_placement_mode"]) Reflect.deleteProperty(values, name);
  if (values.n_gpu === "CPU") values.n_gpu = null;
  if (values.n_gpu === "GPU") values.n_gpu = "auto";
  values.gpu_idx = indices(values.gpu_idx);
  if (values.enable_virtual_env === "unset") delete values.enable_virtual_env;
  values.replica = Number(values.replica ?? 1);
  return { ...values, ...Object.fromEntries(rows.map((row) => [row.key.trim(), row.value])) };
}

/** Return the visitor's token, as the page's own requests carry it. */
export function token(): string | null {
  const found = sessionStorage.getItem(TOKEN);
  return found === null || found === NO_TOKEN ? null : found;
}

/** Return the language of the page, such as "en" or "zh-TW". */
export function language(page: Document): string {
  return page.documentElement.lang || "en";
}

/**
 * Return the properties of the component that renders a form. React leaves them at the element;
 * that is not documented, and where it ends the form is strange and left alone.
 */
function formProps(form: HTMLElement): { form: FormStore; edited: () => void } | null {
  const key = Object.keys(form).find((name) => name.startsWith("__reactFiber$"));
  let fiber: unknown = key && Reflect.get(form, key);
  for (let step = 0; step < NEAR && isObject(fiber); step++) {
    const props = fiber.memoizedProps;
    if (isObject(props) && isStore(props.form)) {
      const edited = props.onUserChange;
      const call = typeof edited === "function" ? (edited as () => void) : () => undefined;
      return { form: props.form, edited: call };
    }
    fiber = fiber.return;
  }
  return null;
}

function isStore(value: unknown): value is FormStore {
  const needed = ["getFieldValue", "getFieldsValue", "setFieldValue", "subscribe"];
  return isObject(value) && needed.every((name) => typeof value[name] === "function");
}

function hasRows(store: FormStore): boolean {
  const rows = store.getFieldValue(ROWS);
  return rows === undefined || Array.isArray(rows);
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null;
}

function indices(value: unknown): number[] | undefined {
  if (typeof value !== "string" || value.trim() === "") return undefined;
  return value.split(",").map(Number);
}
