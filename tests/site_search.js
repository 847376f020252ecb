// node site_search.js SITE < queries.json: what the search of a built site answers, as JSON.
// It runs the site's own worker, as the page does.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const workers = path.join(site, "assets", "javascripts", "workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
let ask;
const scope = vm.createContext({
  addEventListener: (_, handler) => { ask = handler; },
  postMessage: (message) => answers.push(message),
  console: { warn() {} },
});
scope.self = scope;
vm.runInContext(fs.readFileSync(path.join(workers, worker), "utf8"), scope);
(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
  await ask({ data: { type: 0, data: { ...index, options: { suggest: true } } } });
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    await ask({ data: { type: 2, data: query } });
  }
  const found = answers.filter((one) => one.type === 3);
  process.stdout.write(JSON.stringify(found.map((one) =>
    one.data.items.map((group) => group[0].location.split("#")[0]))));
})();
