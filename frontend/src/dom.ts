// SPDX-License-Identifier: Apache-2.0
// Elements in one expression.

type Attributes = Record<string, string | boolean>;

/** Make an element. An attribute that is true is set without a value, and one that is false not. */
export function h<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[Tag] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
