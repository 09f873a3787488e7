"""A shop: an order and the message to ship it commit together, and the worker ships each order once.

    DATABASE_URL=$(pgqueue dsn --url) uvicorn --factory shop:create_app
    curl -d '{"article": "book"}' -H 'Content-Type: application/json' http://127.0.0.1:8000/orders
    curl http://127.0.0.1:8000/orders/1

The worker runs beside the service, in its process. `create_app(url, works=False)` leaves it to a process of its own:
`asyncio.run(worker(url).run())`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import DateTime, func, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgqueue
from pgqueue.contrib.sqlalchemy import queue_of, session_of


class Base(DeclarativeBase):
    """The tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    article: Mapped[str]
    shipped_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class NewOrder(BaseModel):
    """The body of a request."""

    article: str


class PlacedOrder(NewOrder):
    """The body of an answer."""

    model_config = ConfigDict(from_attributes=True)
    id: int
    shipped_at: datetime | None


# The worker


async def ship(delivery: pgqueue.Delivery) -> None:
    """Handle a message: the change of the order commits with the acknowledgement."""
    async with session_of(delivery) as session:
        order = await session.get_one(Order, delivery.message.payload["order_id"])
        order.shipped_at = func.now()


def worker(url: str) -> pgqueue.AsyncConsumer:
    """The consumer of the queue."""
    return pgqueue.AsyncConsumer(url, "orders", ship, transactional=True)


# The service


async def session(request: Request) -> AsyncIterator[AsyncSession]:
    """A session for a request."""
    async with request.app.state.sessions() as session:
        yield session


async def place_order(new: NewOrder, session: Annotated[AsyncSession, Depends(session)]) -> Order:
    """Store an order and send the message to ship it, both or neither."""
    order = Order(article=new.article)
    session.add(order)
    await session.flush()  # The order gets its id.
    await queue_of(session, "orders").enqueue({"order_id": order.id})
    await session.commit()
    return order


async def get_order(order_id: int, session: Annotated[AsyncSession, Depends(session)]) -> Order:
    """An order, with the time when it was shipped."""
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404)
    return order


def create_app(url: str | None = None, works: bool = True) -> FastAPI:
    """The service, with the worker if it `works`. The URL is that of libpq, by default DATABASE_URL."""
    url = url or os.environ["DATABASE_URL"]
    engine = create_async_engine(make_url(url).set(drivername="postgresql+psycopg"))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.sessions = async_sessionmaker(engine, expire_on_commit=False)
        async with engine.begin() as connection:  # In a real program a migration does this.
            await connection.run_sync(Base.metadata.create_all)
            await queue_of(connection, "orders").create_queue(if_not_exists=True)
        consumer = worker(url)
        if works:
            await consumer.start()
        yield
        await consumer.stop()
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.post("/orders", status_code=201, response_model=PlacedOrder)(place_order)
    app.get("/orders/{order_id}", response_model=PlacedOrder)(get_order)
    return app
