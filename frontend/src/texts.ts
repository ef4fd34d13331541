// SPDX-License-Identifier: Apache-2.0
// Everything that the card says, in the languages of the page that it speaks.

import type { Finding, Plan, TierPlan } from "./plan";
import { shown } from "./sizes";

export interface Texts {
  title: string;
  about: string;
  on: string;
  gpu: string;
  gpuHelp: string;
  cpu: string;
  cpuHelp: string;
  transport: string;
  transportHelp: string;
  unit: (of: string) => string;
  slider: (of: string) => string;
  share: (percent: string) => string;
  automatic: string;
  plan: string;
  planning: string;
  noPlan: (reason: string) => string;
  each: string;
  all: (replicas: number) => string;
  tier: (tier: TierPlan, name: "gpu" | "cpu", device: string | null) => string;
  unknownBlocks: (reason: string) => string;
  notASize: string;
  unreadable: (of: string) => string;
  blocked: (reasons: string[]) => string;
  finding: (finding: Finding, plan: Plan) => string;
  /** What fits between a field and the next; `most` is the largest budget in bytes, if known. */
  short: (finding: Finding, most: number | null) => string;
  console: string;
  strange: string;
}

function english(language: string): Texts {
  const number = new Intl.NumberFormat(language);
  return {
    title: "Share KV cache between replicas (Xavier, GPU-first, experimental)",
    about: "A prefix that one replica has computed is loaded by the others.",
    on: "Share KV cache between replicas",
    gpu: "GPU cache budget",
    gpuHelp: "Per replica, allocated at start",
    cpu: "CPU cache budget",
    cpuHelp: "Per replica, for what leaves the GPU",
    transport: "Transport",
    transportHelp: "How blocks come from another replica",
    unit: (of) => `${of}: unit`,
    slider: (of) => `${of}: slider`,
    share: (percent) => `${percent}% of the memory`,
    automatic: "auto (the fastest that works)",
    plan: "What this holds",
    planning: "Asking the server what this holds…",
    noPlan: (reason) => `The server does not tell what this holds (${reason}). It checks at launch.`,
    each: "Each replica",
    all: (replicas) => `All ${number.format(replicas)} replicas`,
    tier: (tier, name, device) => {
      const gpu = device === "cpu" ? "in the GPU tier" : "on the GPU";
      const place = name === "gpu" ? gpu : "in CPU memory";
      if (tier.blocks !== null && tier.tokens !== null) {
        return `${number.format(tier.blocks)} blocks = ${number.format(tier.tokens)} tokens ${place}`;
      }
      if (tier.budget_bytes === null) return `a share ${place}`;
      return `${shown(tier.budget_bytes, language)} ${place}`;
    },
    unknownBlocks: (reason) => `Blocks and tokens are not known yet: ${reason}`,
    notASize: "Give a number of 0 or more, or 0 to 100 %.",
    unreadable: (of) => `${of} is not a size`,
    blocked: (reasons) => `Cannot deploy: ${reasons.join("; ")}`,
    finding: (finding) => finding.message,
    short: (finding, most) => {
      if (finding.code === "below_block") return "Too small to hold anything.";
      if (finding.code === "does_not_fit") {
        return !most ? "Does not fit." : `Does not fit: at most ${shown(most, language)}.`;
      }
      return "Not allowed.";
    },
    console: "Console",
    strange:
      "Xavier does not know this version of the launch dialog and leaves it as it is. Set " +
      "enable_xavier, xavier_gpu_first and the budgets among the engine's additional parameters.",
  };
}

function chinese(language: string): Texts {
  const number = new Intl.NumberFormat(language);
  const names: Record<string, string> = {
    xavier_gpu_cache_bytes: "GPU 缓存预算",
    xavier_cpu_cache_bytes: "CPU 缓存预算",
    xavier_transport: "传输方式",
    replica: "副本数",
  };
  return {
    title: "在副本之间共享 KV 缓存（Xavier，GPU 优先，实验性）",
    about: "一个副本计算过的前缀，其他副本可以直接加载。",
    on: "在副本之间共享 KV 缓存",
    gpu: "GPU 缓存预算",
    gpuHelp: "每个副本，启动时分配",
    cpu: "CPU 缓存预算",
    cpuHelp: "每个副本，存放从 GPU 移出的块",
    transport: "传输方式",
    transportHelp: "如何从其他副本读取块",
    unit: (of) => `${of}：单位`,
    slider: (of) => `${of}：滑块`,
    share: (percent) => `内存的 ${percent}%`,
    automatic: "auto（自动选择最快的可用方式）",
    plan: "可容纳的内容",
    planning: "正在向服务器查询可容纳的内容…",
    noPlan: (reason) => `服务器未返回可容纳的内容（${reason}），启动时会再检查。`,
    each: "每个副本",
    all: (replicas) => `全部 ${number.format(replicas)} 个副本`,
    tier: (tier, name, device) => {
      const gpu = device === "cpu" ? "GPU 层" : "GPU";
      const place = name === "gpu" ? gpu : "CPU 内存";
      if (tier.blocks !== null && tier.tokens !== null) {
        return `${place} ${number.format(tier.blocks)} 块 = ${number.format(tier.tokens)} 个 token`;
      }
      if (tier.budget_bytes === null) return `${place} 按比例分配`;
      return `${place} ${shown(tier.budget_bytes, language)}`;
    },
    unknownBlocks: (reason) => `块数和 token 数尚未知：${reason}`,
    notASize: "请输入不小于 0 的数字，或 0 至 100 %。",
    unreadable: (of) => `${of}不是有效的大小`,
    blocked: (reasons) => `无法部署：${reasons.join("；")}`,
    finding: (finding, plan) => {
      const name = names[finding.field] ?? finding.field;
      const { gpu_bytes, cpu_bytes } = plan.limits;
      const limit = finding.field === "xavier_gpu_cache_bytes" ? gpu_bytes : cpu_bytes;
      const most = limit === null ? "" : `，最多 ${shown(limit, language)}`;
      const known: Record<string, string> = {
        below_block: `${name}小于最低要求`,
        no_tier: "两个预算都是 0，没有空间存放任何块",
        does_not_fit: `${name}超过可用内存${most}`,
        offload_only: "只有一个副本：只用于卸载，没有共享对象",
        unknown_block: "块大小尚未知，只显示字节数",
        host_memory: "此主机没有 GPU：GPU 层位于主机内存中",
        other_hosts: "其他主机上的 worker 会再次检查",
        no_gpu_tier: "GPU 预算为 0：所有块只存放在 CPU 内存中",
        no_cpu_tier: "CPU 预算为 0：离开 GPU 的块会被丢弃",
      };
      return known[finding.code] ?? `${name}：${finding.message}`;
    },
    short: (finding, most) => {
      if (finding.code === "below_block") return "太小，无法存放任何块。";
      if (finding.code === "does_not_fit") {
        return !most ? "内存不足。" : `内存不足：最多 ${shown(most, language)}。`;
      }
      return "不允许的值。";
    },
    console: "控制台",
    strange:
      "Xavier 不认识此版本的启动对话框，因此未作改动。请在引擎附加参数中设置 enable_xavier、" +
      "xavier_gpu_first 和缓存预算。",
  };
}

/** Return the texts for a language tag; other languages than Chinese get English. */
export function texts(language: string): Texts {
  return language.toLowerCase().startsWith("zh") ? chinese(language) : english(language);
}
