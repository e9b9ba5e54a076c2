"use strict";

const $ = (id) => document.getElementById(id);
const chat = []; // {role, content}, as the server takes them
let running = null; // an AbortController while answers are made
let number = 0; // of this chat: an answer to an earlier one is not kept

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function element(name, classes, text) {
  const made = document.createElement(name);
  made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showThreshold() {
  const value = Number($("threshold").value);
  $("threshold-value").value = value;
  $("threshold").setAttribute("aria-valuetext", value === 0 ? "0, exact" : `${value}, larger is faster`);
}

async function problem(response) {
  if (response.status === 401) $("access").open = true;
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with the status ${response.status}`;
  }
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    $("status").textContent = await problem(response);
    return;
  }
  const [model] = (await response.json()).data;
  $("model").textContent = `${model.id}, tree ${model.tree}`;
  $("status").textContent = "";
}

// Yield the data of server-sent events as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function figures(timings) {
  const speed = timings.predicted_per_second.toFixed(1);
  const accepts = `${timings.exact_accepts} drafted, ${timings.fuzzy_accepts} fuzzy`;
  return `tau ${timings.tau.toFixed(2)}, ${speed} tokens/s, ${timings.predicted_n} tokens: ${accepts}`;
}

function answerBox(place, title) {
  const box = element("article", "turn assistant");
  const text = element("p", "text"), line = element("p", "figures");
  line.setAttribute("aria-live", "off"); // it changes with every token
  box.append(element("h2", "", title), text, line);
  place.append(box);
  return { text, line };
}

// Let the server answer the chat, and show the answer as it comes. Return its text.
async function answer(body, box, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal,
    body: JSON.stringify({ ...body, stream: true, timings_per_token: true, return_token_origins: true }),
  });
  if (!response.ok) throw new Error(await problem(response));
  let whole = "";
  try {
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const piece of event.choices[0]?.origins ?? []) {
        const span = element("span", piece.origin, piece.text);
        if (piece.origin === "fuzzy") span.title = "let through by the threshold";
        box.text.append(span);
        whole += piece.text;
      }
      if (event.timings) box.line.textContent = figures(event.timings);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    box.line.textContent += ", stopped";
  }
  return whole;
}

async function send() {
  const message = $("message").value.trim();
  if (!message || running) return;
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "";
  const mine = number;
  const threshold = Number($("threshold").value);
  const turns = [...chat, { role: "user", content: message }];
  const body = {
    messages: turns,
    temperature: Number($("temperature").value),
    max_tokens: Number($("limit").value),
    seed: Math.floor(Math.random() * 2 ** 31), // the same for both answers
  };
  const user = element("article", "turn user");
  user.append(element("h2", "", "You"), element("p", "text", message));
  const place = element("div", "answers");
  $("turns").append(user, place);
  place.setAttribute("aria-busy", "true");
  try {
    // One after the other: side by side they would slow each other down, and the figures would be of neither.
    const exact = { ...body, threshold: 0, divergence: "js" };
    const title = (value) => (value === 0 ? "Exact" : `Threshold ${value}`);
    let alone = null;
    if ($("compare").checked && threshold > 0) {
      const boxes = [answerBox(place, title(0)), answerBox(place, title(threshold))];
      await answer(exact, boxes[0], running.signal);
      alone = boxes[1];
    }
    const box = alone ?? answerBox(place, title(threshold));
    const stopped = running.signal.aborted;
    const text = stopped ? "" : await answer({ ...body, threshold, divergence: "js" }, box, running.signal);
    if (text && mine === number) {
      chat.push({ role: "user", content: message }, { role: "assistant", content: text });
      $("message").value = "";
    }
  } catch (error) {
    if (error.name !== "AbortError") $("status").textContent = error.message;
  } finally {
    place.setAttribute("aria-busy", "false");
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("message").focus();
  }
}

function stop() {
  if (running) running.abort();
}

$("threshold").addEventListener("input", showThreshold);
$("key").addEventListener("change", showModel);
$("stop").addEventListener("click", stop);
$("reset").addEventListener("click", () => {
  stop();
  number += 1;
  chat.length = 0;
  $("turns").replaceChildren();
  $("message").focus();
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
showThreshold();
showModel();
